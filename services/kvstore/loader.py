"""From disk to DRAM.

Layer after layer, all blocks of a run at once, each layer checked before anyone sees it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import Enum
from functools import cache

from kvcommons.rblock.checksum import checksum
from services.kvstore.arena import Arena
from services.kvstore.block import Block
from services.kvstore.slab import SlabFiles
from services.kvstore.tier import PAGE_BYTES, BlockShape

log = logging.getLogger(__name__)

READ_BYTES = 256 << 10  # layers are read together up to here: smaller reads waste the disk
JOINED_BYTES_MAX = 1 << 20  # blocks that lie side by side and are read whole share one read up to here
PIECE_BYTES = 64 << 20  # of blocks that are read whole, which go to the reader before those behind them


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPart:
    """A page-aligned part of a slot, and the layers in it."""

    offset: int
    length: int
    first_layer: int
    end_layer: int


@cache
def read_parts(shape: BlockShape, part_bytes: int) -> tuple[ReadPart, ...]:
    """Cuts a slot into reads. Parts do not overlap; together they are the slot.

    A part has whole layers only, for parts come in any order: where layers do not end at the ends of pages,
    more of them share a part than `part_bytes` asks for.
    """
    parts: list[ReadPart] = []
    offset = layer = 0
    for end_layer in range(1, shape.layers + 1):
        end = end_layer * shape.object_bytes
        last = end_layer == shape.layers
        if not last and (end % PAGE_BYTES or end + shape.object_bytes - offset <= part_bytes):
            continue
        end = -(-end // PAGE_BYTES) * PAGE_BYTES
        parts.append(ReadPart(offset=offset, length=end - offset, first_layer=layer, end_layer=end_layer))
        offset, layer = end, end_layer
    return tuple(parts)


class Outcome(Enum):
    """How a load ended."""

    GOOD = "good"
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"


class BlockLoad:
    """Progress of one block's load. Layers become readable in order; any number of threads wait for them."""

    __slots__ = ("_parts_left", "_ready", "condition", "outcome")

    def __init__(self, parts: int, condition: threading.Condition) -> None:
        """`condition`: that of all blocks whose loads start together."""
        self.condition = condition
        self.outcome: Outcome | None = None  # set once nothing more will come
        self._ready = 0  # a bit for each layer
        self._parts_left = parts

    def ready(self, layer: int) -> bool:
        """Whether this layer is in DRAM and right."""
        return bool(self._ready >> layer & 1)

    def wait(self, layer: int, timeout_s: float) -> bool:
        """Whether this layer is in DRAM and right; False after the time-out as well."""
        with self.condition:
            self.condition.wait_for(lambda: self.ready(layer) or self.given_up, timeout_s)
            return self.ready(layer)

    def wait_over(self, timeout_s: float) -> None:
        """Until nothing more will come, or the time-out."""
        with self.condition:
            self.condition.wait_for(lambda: self.outcome is not None, timeout_s)

    @property
    def given_up(self) -> bool:
        """No layer that is not ready yet will be."""
        return self.outcome in (Outcome.CORRUPT, Outcome.UNREADABLE)

    def fail(self, outcome: Outcome) -> None:
        """Gives up. Whoever calls it holds the condition, and notifies, as with `part_came`."""
        if not self.given_up:
            self.outcome = outcome

    def part_came(self, layers: range) -> bool:
        """These layers are readable (none if their part failed). Whether this was the last part."""
        self._ready |= (1 << layers.stop) - (1 << layers.start)
        self._parts_left -= 1
        if not self._parts_left and self.outcome is None:
            self.outcome = Outcome.GOOD
        return not self._parts_left


class Loader:
    """Reads blocks into the DRAM slots that they have, on the threads of `pool`.

    `done` is called with blocks whose loads have ended.
    """

    def __init__(
        self,
        slabs: SlabFiles,
        arena: Arena,
        pool: Executor,
        done: Callable[[Sequence[Block]], None],
        read_bytes: int = READ_BYTES,
    ) -> None:
        self._slabs = slabs
        self._arena = arena
        self._done = done
        self._pool = pool
        self._read_bytes = read_bytes

    def begin(self, block: Block, condition: threading.Condition) -> BlockLoad:
        """Gives the block a load that nothing has come for yet; `start` is to follow."""
        shape = block.space.shape
        block.load = BlockLoad(len(read_parts(shape, self._read_bytes)), condition)
        return block.load

    def together(self, shape: BlockShape) -> int | None:
        """How many blocks go to a reader in all layers before those behind them; None: all go layer by layer,
        for that is how they are read."""
        if len(read_parts(shape, self._read_bytes)) > 1:
            return None
        return max(1, PIECE_BYTES // shape.slot_bytes)

    def start(self, blocks: Sequence[Block], first_layer: int) -> None:
        """Queues the reads of blocks of one model, whose `load` (with one condition) and `checksums` are set.

        The part with `first_layer` comes first, for all blocks; then the rest in turn, so that while one
        layer is sent the next ones are being read.
        """
        if not blocks:
            return
        parts = read_parts(blocks[0].space.shape, self._read_bytes)
        wanted = next(i for i, part in enumerate(parts) if part.end_layer > first_layer)
        for part in parts[wanted:] + parts[:wanted]:
            for row in _rows(blocks) if len(parts) == 1 else [[block] for block in blocks]:
                self._pool.submit(self._read, row, part)

    def close(self) -> None:
        """Loads under way finish, queued ones never do."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def give_up(self, blocks: Sequence[Block]) -> None:
        """Instead of `start`, for blocks that cannot be read."""
        if not blocks:
            return
        for block in blocks:
            assert block.load is not None
            with block.load.condition:
                block.load.fail(Outcome.UNREADABLE)
                block.load.condition.notify_all()
        self._done(blocks)

    def _read(self, blocks: Sequence[Block], part: ReadPart) -> None:
        try:
            self._fill(blocks, part)
            outcomes = [self._verify(block, part) for block in blocks]
        except Exception as error:
            log.error("reading %d blocks from disk failed: %s", len(blocks), error)
            outcomes = [Outcome.UNREADABLE] * len(blocks)
        self._finish(blocks, part, outcomes)

    def _fill(self, blocks: Sequence[Block], part: ReadPart) -> None:
        assert blocks[0].disk is not None
        if blocks[0].load is not None and blocks[0].load.given_up:
            return
        into = []
        for block in blocks:
            assert block.dram is not None
            into.append(self._arena.slot(block.dram)[part.offset : part.offset + part.length])
        self._slabs.read(blocks[0].disk, part.offset, into)

    def _verify(self, block: Block, part: ReadPart) -> Outcome:
        assert block.dram is not None
        assert block.checksums is not None
        for layer in range(part.first_layer, part.end_layer):
            if (
                checksum(block.block_id, layer, self._arena.object(block.dram, layer))
                != block.checksums[layer]
            ):
                return Outcome.CORRUPT
        return Outcome.GOOD

    def _finish(self, blocks: Sequence[Block], part: ReadPart, outcomes: Sequence[Outcome]) -> None:
        """All at once: for each by itself, whoever waits would be woken for it."""
        assert blocks[0].load is not None
        condition, over = blocks[0].load.condition, []
        with condition:
            for block, outcome in zip(blocks, outcomes, strict=True):
                load = block.load
                assert load is not None
                if outcome is not Outcome.GOOD:
                    load.fail(outcome)
                came = range(part.first_layer, part.end_layer) if outcome is Outcome.GOOD else range(0)
                if load.part_came(came):
                    over.append(block)
            condition.notify_all()
        if over:
            self._done(over)


def _rows(blocks: Sequence[Block]) -> list[list[Block]]:
    """Blocks that lie side by side on disk, together: one read fetches them all."""
    rows: list[list[Block]] = []
    size = 0
    for block in sorted(blocks, key=lambda block: block.disk or (0, 0)):
        assert block.disk is not None
        last = rows[-1][-1].disk if rows else None
        size += block.space.shape.slot_bytes
        if last is None or block.disk != (last.region, last.place + 1) or size > JOINED_BYTES_MAX:
            rows.append([])
            size = block.space.shape.slot_bytes
        rows[-1].append(block)
    return rows
