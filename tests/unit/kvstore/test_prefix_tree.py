"""Identities are chained, so the blocks of a store are a radix tree: what branches share, what becomes of
those that outlive what they stand on, and what another tenant can learn of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvcommons.rblock.identity import IdentityChain, tenant_salt
from services.kvstore.blocks import BlockStore
from tests.unit.kvstore.samples import (
    MIB,
    SHAPE,
    block_ids,
    layer_put,
    open_store,
    put_blocks,
    put_layer,
    read_blocks,
    wait_durable,
)

BLOCK = 4  # tokens
SYSTEM = list(range(100, 112))  # three blocks
SECRET = b"sixteen bytes or more of secret"


def chain(tokens: Sequence[int], tenant: str = "alice") -> list[bytes]:
    ids = IdentityChain(tenant_salt(SECRET, tenant), SHAPE.model, BLOCK)
    ids.extend(tokens)
    return ids.ids


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    opened = open_store(tmp_path)
    yield opened
    opened.close()


def matched(store: BlockStore, ids: Sequence[bytes]) -> int:
    return len(store.match(SHAPE.model, ids, peek=True))


def put_after(store: BlockStore, ids: Sequence[bytes], present: int) -> list[int]:
    """As prefill saves: what it found stays where it is, what it computed is sent. What is not wanted."""
    unwanted: list[int] = []
    for layer in range(SHAPE.layers):
        put = layer_put(ids[present:], layer)
        unwanted = put_layer(
            store, replace(put, parent=ids[present - 1] if present else b"", first_block=present)
        )
    return unwanted


def test_branches_share_what_they_have_in_common_down_to_a_block(store: BlockStore) -> None:
    """A session, its fork and a stateless request: one system prompt, then each its own."""
    session, fork = chain([*SYSTEM, *range(8)]), chain([*SYSTEM, *range(4), *range(50, 54)])
    stateless = chain([*SYSTEM, 1, 1, 1, 1])
    put_blocks(store, session)
    assert [matched(store, ids) for ids in (session, fork, stateless)] == [5, 4, 3]
    put_after(store, fork, 4)
    put_after(store, stateless, 3)
    assert [matched(store, ids) for ids in (session, fork, stateless)] == [5, 5, 4]
    assert store.stats().dram_blocks == len({*session, *fork, *stateless}) == 7  # each block once
    assert [read_blocks(store, ids) for ids in (session, fork, stateless)] == [5, 5, 4]
    part = chain([*SYSTEM[:10], 0, 0])  # parts within the third block: what came before it is shared
    assert matched(store, part) == 2


def test_a_block_is_nobodys_before_it_is_whole(store: BlockStore) -> None:
    ids = chain(SYSTEM)
    for layer in range(SHAPE.layers - 1):
        put_layer(store, layer_put(ids, layer))
        assert matched(store, ids) == 0
        assert read_blocks(store, ids) == 0
    put_layer(store, layer_put(ids, SHAPE.layers - 1))
    assert matched(store, ids) == len(ids)


def test_readers_hold_what_they_read_and_no_more(store: BlockStore) -> None:
    """Two branches are read; a block is given up by the last of its readers."""
    left, right = chain([*SYSTEM, 1, 1, 1, 1]), chain([*SYSTEM, 2, 2, 2, 2])
    put_blocks(store, left)
    put_after(store, right, 3)
    wait_durable(store, right)
    for ids in (left, right):
        wait_durable(store, ids)
    with store.open_run(SHAPE.model, left) as one:
        with store.open_run(SHAPE.model, right):
            store.forget(SHAPE.model, [*left, *right])
            assert store.stats().dram_blocks == 5  # found by nobody, held by two
            assert matched(store, left) == 0
        assert store.stats().dram_blocks == 4  # the other branch's own block went with its reader
        assert len(one) == 4
    assert store.stats().dram_blocks == 0


@pytest.mark.parametrize("hole", [0, 2, 4])
def test_blocks_beyond_a_hole_are_found_again_once_it_is_filled(store: BlockStore, hole: int) -> None:
    """A block fails its check and is dropped. The identities of its descendants do not depend on whether it
    is there: out of reach now, they are of use again as soon as somebody computes the one."""
    ids = chain([*SYSTEM, *range(12)])
    put_blocks(store, ids)
    assert wait_durable(store, ids) == len(ids)
    with store.open_run(SHAPE.model, ids) as run:
        generation = run.layer(0, 10)[1][hole]
    assert store.condemn(SHAPE.model, ids[hole], generation)
    assert matched(store, ids) == read_blocks(store, ids) == hole
    unwanted = put_after(store, ids, hole)  # prefill computes all that it could not load
    assert unwanted == list(range(1, len(ids) - hole))  # and only the one is taken
    assert matched(store, ids) == read_blocks(store, ids) == len(ids)


def fill(store: BlockStore, groups: range) -> list[list[bytes]]:
    """Prompts in chunks, as prefill saves them: three branches from one system prompt at a time."""
    prompts = []
    for group in groups:
        system = block_ids(4, f"system {group}")
        for branch in range(3):
            ids = [*system, *block_ids(5, f"branch {group} {branch}")]
            prompts.append(ids)
            put_after(store, ids[:6], 4 if branch else 0)
            wait_durable(store, ids[:6])
            put_after(store, ids, 6)
            wait_durable(store, ids)
    return prompts


@pytest.mark.parametrize("restarts", [False, True])
def test_eviction_leaves_no_block_that_nobody_can_reach(tmp_path: Path, restarts: bool) -> None:
    """Prompts that nobody asks for again, in a store with room for a few. What is left of each is its
    beginning: a block without the one before it would take room and be of no use."""
    capacity = {"dram_bytes": MIB // 4, "disk_bytes": MIB, "slab_bytes_min": MIB // 4}
    store = open_store(tmp_path, **capacity)
    prompts = fill(store, range(5 if restarts else 12))
    if restarts:
        store.close()
        store = open_store(tmp_path, **capacity)
        assert sum(matched(store, ids) for ids in prompts) > 0
        prompts += fill(store, range(5, 7))
    alone = {block_id: matched(store, [block_id]) for ids in prompts for block_id in ids}
    assert 0 < sum(alone.values()) < len(alone)  # there was not room for all, and there was for some
    for ids in prompts:
        assert sum(alone[block_id] for block_id in ids) == matched(store, ids)
    store.close()


def test_a_block_that_is_looked_after_keeps_those_before_it(tmp_path: Path) -> None:
    """After a restart, while the scrub reads the very block that would go next: what it continues stays, and
    the end of another prompt goes."""
    capacity = {"dram_bytes": MIB // 4, "disk_bytes": MIB, "slab_bytes_min": MIB // 4, "scrub_bytes_per_s": 0}
    store = open_store(tmp_path, **capacity)
    prompts = fill(store, range(5))
    store.close()
    store = open_store(tmp_path, **capacity)
    space = store._catalog._spaces[SHAPE.model]
    first = space.disk_policy.victim(lambda block_id: False)
    assert first is not None
    space.blocks[first].disk_pins += 1
    prompts += fill(store, range(5, 6))
    assert matched(store, [first])
    for ids in prompts:
        assert sum(matched(store, [block_id]) for block_id in ids) == matched(store, ids)
    with store._lock:
        store._catalog.unpin_disk(space.blocks[first])
    prompts += fill(store, range(6, 7))
    assert not matched(store, [first])
    store.close()


class Looked(dict[bytes, object]):
    """Counts what is looked up."""

    count = 0

    def get(self, key: bytes, default: object = None) -> object:  # type: ignore[override]
        self.count += 1
        return super().get(key, default)


def test_another_tenants_content_costs_a_look_up_as_unknown_content_does(store: BlockStore) -> None:
    """Latency tells nothing: for the same text under another tenant's salt the store does the very work that
    it does for a text that nobody ever had."""
    text = [*SYSTEM, *range(20)]
    mine, others, unknown = chain(text, "alice"), chain(text, "bob"), chain([7] * len(text), "bob")
    put_blocks(store, mine)
    assert not {*mine} & {*others}
    space = store._catalog._spaces[SHAPE.model]
    space.blocks = looked = Looked(space.blocks)  # type: ignore[assignment]
    work = []
    for ids in (others, unknown, mine):
        looked.count = 0
        before = store.stats().counters
        found = len(store.match(SHAPE.model, ids))
        after = store.stats().counters
        work.append((found, looked.count, after.hits_dram - before.hits_dram, after.misses - before.misses))
    assert work[0] == work[1] == (0, 1, 0, len(others))
    assert work[2][:2] == (len(mine), len(mine))
