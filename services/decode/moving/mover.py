"""KV that moves while its sequence decodes: frozen where it lies, copied, switched to at an iteration's
border, and only then given back (architecture: a swap's four steps).

The sequence waits for the switch alone, which is a change of its block table.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from kvcommons.engine.callbacks import Movable
from kvcommons.engine.core import Core
from kvcommons.engine.engine import Engine
from kvcommons.engine.sequence import LocalRun, Run
from kvcommons.errors import CapacityExhausted, KVCommonsError
from kvcommons.holder.copying import copy_blocks
from kvcommons.holder.head_group import Creditor
from kvcommons.holder.segments import SegmentRef
from kvcommons.placement.auto import Costs
from kvcommons.transport.deadline import Deadline
from services.decode.borrowing.loans import Loans
from services.decode.metrics import DecodeMetrics
from services.decode.periodic import PeriodicTask

log = logging.getLogger(__name__)

T = TypeVar("T")

CALL_S = 1.0  # a call to a holder
COPY_S = 20.0  # all layers of one move
HOMECOMING_S = 1.0  # between attempts to bring blocks home
HOMECOMING_BLOCKS = 16  # at once: copying competes with attention for the link
SPARE_SHARE = 0.25  # of all blocks, kept free for sequences that arrive and grow


@dataclass(slots=True, kw_only=True, eq=False)
class Move:
    """The leading `blocks` of a borrowed run, on their way."""

    of: Movable
    blocks: int
    frozen: SegmentRef
    switched: bool = False

    @property
    def holder(self) -> Creditor:
        return self.of.run.holder


class Mover:
    """Belongs to the event loop. A run has one move at a time."""

    def __init__(
        self, core: Core, engine: Engine, loans: Loans, metrics: DecodeMetrics, costs: Costs
    ) -> None:
        """`costs` takes what moving takes."""
        self._costs = costs
        self._core = core
        self._engine = engine
        self._loans = loans
        self._metrics = metrics
        self._observe = core.allocator.observe
        self._moving: set[tuple[Creditor, SegmentRef]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Whoever asked may go away: what has begun to write to blocks, or to change a sequence's table, is
        not left in the middle."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def movable(self, holder: Creditor | None = None) -> list[Movable]:
        """What could be moved now, of one holder's or of all, oldest sequence first."""
        found = await asyncio.wrap_future(self._engine.survey(holder))
        return [one for one in found if (one.run.holder, one.run.ref) not in self._moving]

    async def freeze(self, one: Movable, blocks: int) -> Move | None:
        """Begins a move; None where its sequence has ended, or moves already. `thaw` or `release` ends it.
        Raises Unavailable, DeadlineExceeded."""
        run = one.run
        place = (run.holder, run.ref)
        if place in self._moving or run.first_block != one.first_block:
            return None
        self._moving.add(place)
        try:
            frozen = await run.holder.freeze(run.ref, run.segment_block + blocks, timeout_s=CALL_S)
        except BaseException as error:
            self._moving.discard(place)
            if isinstance(error, KVCommonsError) and run.ref not in run.holder.borrowed:
                return None
            raise
        return Move(of=one, blocks=blocks, frozen=frozen)

    async def copy_home(self, move: Move, blocks: list[int]) -> bool:
        """All layers into these physical blocks, which nobody else writes to; False where the sequence has
        ended meanwhile. Raises what the holder raises."""
        loop = asyncio.get_running_loop()
        run, began_s = move.of.run, loop.time()
        try:
            await asyncio.to_thread(
                copy_blocks,
                run.holder.read_blocks,
                move.frozen,
                run.segment_block,
                self._core.memory,
                blocks,
                Deadline.after(COPY_S),
            )
        except KVCommonsError:
            if run.ref in run.holder.borrowed:
                raise
            return False
        self._record("copy", move, home=blocks)
        self._costs.moved(len(blocks) * self._core.layout.block_bytes, loop.time() - began_s)
        return True

    async def switch(self, move: Move, moved: Run) -> float | None:
        """The sequence uses the copies from its next iteration on: the seconds that it waited for that. None
        where it has ended; `moved` is still the caller's then."""
        paused_s = await asyncio.wrap_future(self._engine.switch(move.of, moved, move.frozen))
        if paused_s is not None:
            move.switched = True
            self._record("switch", move, count=move.blocks)
            self._metrics.moved(move.blocks, paused_s, home=isinstance(moved, LocalRun))
        return paused_s

    async def release(self, move: Move, settlement: str = "") -> None:
        """Gives the blocks back that were switched from. What the creditor does not answer, its lease
        ends."""
        try:
            await self._loans.trim(move.holder, move.frozen, move.blocks, settlement)
        except KVCommonsError as error:
            log.info("moved blocks come free with their segment: %s", error.message)
        finally:
            self._moving.discard((move.holder, move.frozen))

    async def thaw(self, move: Move) -> None:
        """Instead of a switch: all is as it was."""
        try:
            await move.holder.thaw(move.frozen, timeout_s=CALL_S)
        except KVCommonsError as error:
            log.info("a freeze was not taken back: %s", error.message)
        finally:
            self._moving.discard((move.holder, move.frozen))

    async def bring_home(
        self,
        blocks: int,
        *,
        holder: Creditor | None = None,
        spare: int = 0,
        wanted: Callable[[Movable, int], bool] = lambda one, blocks: True,
    ) -> int:
        """Up to `blocks` come home, as long as more than `spare` are free here; how many did. `wanted`:
        whether so many of a run should. Raises what a holder raises."""
        home = 0
        for one in await self.movable(holder):
            count = min(one.blocks, blocks - home, self._core.allocator.free - spare)
            if count < 1:
                break
            if wanted(one, count):
                home += await self._bring_home(one, count)
        return home

    async def send_away(self, blocks: int, holder: Creditor) -> int:
        """Up to `blocks` go from this holder to others; how many did."""
        away = 0
        for one in await self.movable(holder):
            count = min(one.blocks, blocks - away)
            if count < 1:
                break
            away += await self._send_away(one, count)
        return away

    def _record(self, event: str, move: Move, **facts: object) -> None:
        ref = move.frozen
        self._observe(event, handle=ref.handle, epoch=ref.epoch, generation=ref.generation, **facts)

    async def _bring_home(self, one: Movable, count: int) -> int:
        allocator = self._core.allocator
        move = await self.freeze(one, count)
        if move is None:
            return 0
        blocks: list[int] = []
        try:
            blocks = allocator.allocate(count)
            moved = LocalRun(first_block=one.run.first_block, blocks=list(blocks))
            if await self.copy_home(move, blocks):
                await self.switch(move, moved)
        except CapacityExhausted:
            pass  # a new sequence was quicker
        finally:
            # Once switched, the blocks are the sequence's.
            if not move.switched:
                allocator.release(blocks)
                await self.thaw(move)
        if move.switched:
            await self.release(move)
        return count if move.switched else 0

    async def _send_away(self, one: Movable, count: int) -> int:
        run = one.run
        target = await self._loans.elsewhere(
            one.key, one.request_id, blocks=count, first_block=run.first_block, but=run.holder
        )
        if target is None:
            return 0
        move = None
        try:
            move = await self.freeze(one, count)
            if move is not None:
                await target.holder.copy_in(
                    target.ref,
                    run.holder.data_address,
                    move.frozen,
                    first_block=0,
                    source_block=run.segment_block,
                    blocks=count,
                    timeout_s=COPY_S,
                )
                self._record("copy", move, home=[])
                await self.switch(move, target)
        finally:
            if move is None or not move.switched:
                self._loans.give_back([target])
                if move is not None:
                    await self.thaw(move)
        if move is None or not move.switched:
            return 0
        await self.release(move)
        return count


class Homecoming:
    """Brings blocks home while there is room for them: what was borrowed in need is a round trip a layer
    without it. Some room stays for sequences that arrive."""

    def __init__(self, core: Core, mover: Mover, costs: Costs) -> None:
        self._core = core
        self._mover = mover
        self._costs = costs
        self._spare = max(2, int(core.allocator.total * SPARE_SHARE))
        self.task = PeriodicTask("homecoming", HOMECOMING_S, self._look)

    async def _look(self) -> None:
        free = self._core.allocator.free - self._spare
        if free > 0:
            blocks = min(free, HOMECOMING_BLOCKS)
            await self._mover.to_the_end(
                self._mover.bring_home(blocks, spare=self._spare, wanted=self._wanted)
            )

    def _wanted(self, one: Movable, blocks: int) -> bool:
        return one.comes_home and self._costs.pays_to_fetch(blocks=blocks, tokens_left=one.tokens_left)
