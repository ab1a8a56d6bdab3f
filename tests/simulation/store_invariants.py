"""What holds of a block store at every moment at which nobody is in the middle of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from services.kvstore.block import Block
from services.kvstore.blocks import BlockStore
from services.kvstore.index import decode_entry, decode_key
from services.kvstore.policies.base import nothing_pinned
from services.kvstore.policies.hit_density import HitDensity
from services.kvstore.tier import PAGE_BYTES, Slot, Tier
from tests.simulation.machine import require

if TYPE_CHECKING:
    from tests.simulation.store_schedule import StoreSchedule


def blocks_of(store: BlockStore) -> Iterator[Block]:
    """All that can be found."""
    for space in store._catalog._spaces.values():
        yield from space.blocks.values()


def on_disk(store: BlockStore) -> dict[tuple[bytes, bytes], int]:
    """The generations of the blocks that the store calls durable."""
    return {
        (block.space.shape.model, block.block_id): block.generation
        for block in blocks_of(store)
        if block.disk is not None
    }


def check(schedule: StoreSchedule) -> None:
    """Raises Violation."""
    catalog = schedule.store._catalog
    blocks = list(blocks_of(schedule.store))
    known = {id(block): block for block in [*schedule.seen.values(), *catalog.pending]}
    detached = [block for block in known.values() if block.detached]
    for block in [*blocks, *detached]:
        require(block.pins >= 0 and block.disk_pins >= 0, "a block has less than no pins")
    _check_dram(schedule, [*blocks, *detached])
    _check_disk(schedule, blocks, detached)
    _check_index(schedule, blocks)
    _check_policies(schedule)
    counters = catalog.counters
    require(counters.corrupt <= schedule.damage + schedule.condemned, "a good block was called corrupt")
    require(not counters.read_errors or schedule.failed_reads, "a good block was called unreadable")


def _check_dram(schedule: StoreSchedule, blocks: list[Block]) -> None:
    catalog = schedule.store._catalog
    owners = [block.dram for block in blocks if block.dram is not None]
    owners += [
        staging.slot
        for space in catalog._spaces.values()
        for writers in space.stagings.values()
        for staging in writers.values()
    ]
    late = {id(place): place for _, incoming in schedule.puts for place in incoming._places}
    owners += [place.slot for place in late.values() if getattr(place, "dropped", False)]
    _check_tier(catalog.dram, owners, {})


def _check_disk(schedule: StoreSchedule, blocks: list[Block], detached: list[Block]) -> None:
    catalog = schedule.store._catalog
    owners = [block.disk for block in blocks if block.disk is not None]
    owners += [copy.slot for copy in catalog.evictor.doomed]
    owners += [b.disk for b in detached if b.disk is not None and b.unindexed and b.disk_pins]
    _check_tier(catalog.disk, owners, {r.number: r.aside for r in catalog.disk.regions.values()})
    size = sum(len(content.current) for content in schedule.platter.files.values())
    require(size <= catalog.disk.capacity_bytes, "slab files are larger than disk_bytes")


def _check_tier(tier: Tier, owners: list[Slot], aside: dict[int, int]) -> None:
    """Each slot has one owner or is free; none is forgotten."""
    require(tier.used_bytes <= tier.capacity_bytes, "regions are larger than the capacity")
    require(len(set(owners)) == len(owners), "a slot has two owners")
    by_region = Counter(slot.region for slot in owners)
    require(set(by_region) <= set(tier.regions), "a block lies in a region that is not there")
    for number, region in tier.regions.items():
        free = [*region.recycled, *region.unwritten, *range(region.fresh, region.slots)]
        require(len(set(free)) == len(free), "a slot is free twice")
        require(len(free) + region.occupied == region.slots, "free slots and used ones are not all slots")
        used = {slot.place for slot in owners if slot.region == number}
        require(not used & set(free), "a slot is free and in use")
        require(by_region[number] + aside.get(number, 0) == region.occupied, "a slot has no owner")


def _check_index(schedule: StoreSchedule, blocks: list[Block]) -> None:
    """The index names what the store has on disk, and what is about to be deleted."""
    catalog = schedule.store._catalog
    there = {(b.space.shape.model, b.block_id): b for b in blocks if b.disk is not None}
    doomed = {(copy.model, copy.block_id) for copy in catalog.evictor.doomed}
    for table in (schedule.rocks.current, schedule.rocks.durable):
        named = set()
        for (family, key), value in table.items():
            if family != "blocks":
                continue
            name = decode_key(key)
            entry = decode_entry(value)
            block = there.get(name)
            right = block is not None and (block.generation, block.disk) == (entry.generation, entry.slot)
            uncertain = (family, key) in schedule.rocks.uncertain
            require(right or name in doomed or uncertain, "the index names a block that is not there")
            if right:
                named.add(name)
        require(named == set(there), "a block is on disk and the index does not say so")


def _check_policies(schedule: StoreSchedule) -> None:
    """The policies know of the blocks in their tier, and of no others."""
    for space in schedule.store._catalog._spaces.values():
        for policy, there in (
            (
                space.dram_policy,
                {b.block_id for b in space.blocks.values() if b.dram is not None and not b.passing},
            ),
            (space.disk_policy, {b.block_id for b in space.blocks.values() if b.disk is not None}),
        ):
            require(set(policy._tenants) == there, "the tenants' floors count other blocks")
            aside = {key for keys in policy._aside.values() for key in keys}
            density = policy.policy
            if isinstance(density, HitDensity):
                held = {key for key, node in density._nodes.items() if node.held}
                require(not held & aside, "a block that was put aside is still in the policy")
                require(held | aside == there and density._held == len(held), "a policy knows other blocks")
            elif there:
                require(policy.victim(nothing_pinned) in there, "a policy gives up a block that is not there")


def check_untouched(schedule: StoreSchedule, name: str, offset: int, length: int) -> None:
    """Nothing may be written over what the index names, or over what a reader has pinned."""
    catalog = schedule.store._catalog
    number = int(name.removeprefix("slab-"))
    region = catalog.disk.regions[number]
    first = (offset - PAGE_BYTES) // region.shape.slot_bytes
    places = {Slot(number, place) for place in range(first, first + length // region.shape.slot_bytes)}
    for table in (schedule.rocks.current, schedule.rocks.durable):
        for (family, _), value in table.items():
            if family == "blocks":
                require(decode_entry(value).slot not in places, "what the index names is written over")
    for block in schedule.seen.values():
        require(not block.disk_pins or block.disk not in places, "what a reader has pinned is written over")


def place_of(block: Block) -> tuple[str, int]:
    """The slab file that has the block, and where in it."""
    assert block.disk is not None
    start = PAGE_BYTES + block.disk.place * block.space.shape.slot_bytes
    return f"slab-{block.disk.region:08d}", start
