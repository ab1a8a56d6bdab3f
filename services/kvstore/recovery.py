"""At start: what the index names, checked against the slab files that are there.

Only blocks whose payload was durable are in the index, so whatever moment the process was killed at, what is
found here is whole. What does not fit together is deleted: it can be computed again.
"""

from __future__ import annotations

import logging
import sys
from typing import NamedTuple

from services.kvstore.catalog import Catalog
from services.kvstore.index import BlockIndex
from services.kvstore.lineage import by_worth
from services.kvstore.slab import SlabFiles
from services.kvstore.tier import BlockShape, Slot

log = logging.getLogger(__name__)

_DELETIONS_MAX = 10_000


def recover(catalog: Catalog, slabs: SlabFiles, index: BlockIndex, now_s: float) -> int:
    """Fills an empty catalog; how many blocks were found. Raises UnknownFormat, StoreUnavailable."""
    shapes: dict[int, BlockShape] = {}
    for number, shape, slots in slabs.discover():
        shapes[number] = shape
        catalog.disk.add(number, shape, slots)
    found, bad = _scan(catalog, index, shapes)
    for start in range(0, len(bad), _DELETIONS_MAX):
        index.remove(bad[start : start + _DELETIONS_MAX])
    if bad:
        log.warning("%d index entries name nothing on disk and were dropped", len(bad))
    for number in shapes:
        inside = found.get(number, {})
        if inside:
            catalog.disk.restore(number, inside)
        else:
            catalog.disk.remove(number)
            slabs.remove(number)
    for shape in set(shapes.values()):
        inside_shape = {number: inside for number, inside in found.items() if shapes[number] == shape}
        _restore(catalog, shape, inside_shape, now_s)
    while (excess := catalog.evictor.excess_disk_region()) is not None:
        region, doomed = excess
        if doomed:
            index.remove([(copy.model, copy.block_id) for copy in doomed])
        catalog.disk.remove(region.number)
        slabs.remove(region.number)
    return catalog.disk.occupied


class _Placed(NamedTuple):
    """What is needed of an entry to find its block again; there are many."""

    created_ms: int
    first_index: int
    generation: int
    place: int
    block_id: bytes
    parent: bytes
    tenant: str


_Found = dict[int, dict[int, _Placed]]  # region, place: what lies there


def _scan(
    catalog: Catalog, index: BlockIndex, shapes: dict[int, BlockShape]
) -> tuple[_Found, list[tuple[bytes, bytes]]]:
    found: _Found = {}
    bad: list[tuple[bytes, bytes]] = []
    for model, block_id, entry in index.scan():
        shape = shapes.get(entry.slot.region) if entry else None
        if (
            entry is None
            or shape is None
            or entry.model != model
            or shape.model != model
            or len(entry.checksums) != shape.layers
            or entry.slot.place >= catalog.disk.regions[entry.slot.region].slots
        ):
            bad.append((model, block_id))
            continue
        places = found.setdefault(entry.slot.region, {})
        other = places.get(entry.slot.place)
        if other is not None and other.generation > entry.generation:
            bad.append((model, block_id))
            continue
        if other is not None:
            bad.append((model, other.block_id))
        places[entry.slot.place] = _Placed(
            entry.created_ms,
            entry.first_index,
            entry.generation,
            entry.slot.place,
            block_id,
            entry.parent,
            sys.intern(entry.tenant),
        )
    return found, bad


def _restore(
    catalog: Catalog, shape: BlockShape, regions: dict[int, dict[int, _Placed]], now_s: float
) -> None:
    """Those that should go first in front."""
    placed = {
        block.block_id: (block, number) for number, inside in regions.items() for block in inside.values()
    }
    if placed:
        order = [placed[block_id] for block_id in by_worth(block for block, _ in placed.values())]
        found = (
            (block.block_id, block.parent, block.generation, Slot(number, block.place), block.tenant)
            for block, number in order
        )
        catalog.restore(shape, found, now_s)
