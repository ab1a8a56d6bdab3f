"""History for tests, whose layers come when a test says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcommons.blockstore.loader import BlockLoader, LayerLoad
from kvcommons.engine.core import Core
from kvcommons.rblock.layout import Layout
from kvcommons.transport.deadline import Deadline

if TYPE_CHECKING:
    from kvcommons.blockstore.loader import Destination

KeptKV = Mapping[bytes, Sequence[bytes]]
"""By a block's identity its objects, a layer after the other."""


def kept_kv(core: Core, ids: Sequence[bytes]) -> KeptKV:
    """Of those blocks that are published there."""
    blocks = core.allocator.match(ids)
    layers = [core.memory.read_buffers(layer, blocks) for layer in core.layers]
    kept = {one: [bytes(of[index]) for of in layers] for index, one in enumerate(ids[: len(blocks)])}
    core.allocator.release(blocks)
    return kept


class HeldLoad(LayerLoad):
    """Its next layer comes with each `come`."""

    def __init__(self, kept: KeptKV, ids: Sequence[bytes], destination: Destination, layers: int) -> None:
        super().__init__(layers, len(ids), layers)
        self._kept = kept
        self._ids = ids
        self._destination = destination

    def come(self, blocks: int | None = None) -> None:
        """With so many leading blocks; None: with all that are still wanted."""
        layer = self.layers_arrived
        count = self._blocks if blocks is None else min(blocks, self._blocks)
        with self._destination(layer, 0, count) as buffers:
            for buffer, identity in zip(buffers, self._ids, strict=False):
                memoryview(buffer)[:] = self._kept[identity][layer]
        self._advance(count)
        if self.layers_arrived == self._layers:
            self._end(None)


class HeldLoader(BlockLoader):
    """A loader without a store. `at_once`: the layers of each load that come when it begins, each with so
    many leading blocks (None: all)."""

    def __init__(self, kept: KeptKV | None = None, at_once: Sequence[int | None] = ()) -> None:
        super().__init__(lambda _: None)
        self.loads: list[HeldLoad] = []
        self._kept = kept or {}
        self._at_once = at_once

    def load(
        self,
        address: str,
        model: bytes,
        layout: Layout,
        block_ids: Sequence[bytes],
        destination: Destination,
        deadline: Deadline,
        **_: Any,
    ) -> LayerLoad:
        load = HeldLoad(self._kept, block_ids, destination, layout.layers)
        self.loads.append(load)
        for blocks in self._at_once:
            load.come(blocks)
        return load
