"""Holders that join a sequence while its prompt is computed (KVP: Mnemosyne, section 4.4): a part of its
memory is reserved when it arrives, each further part when whoever computes the prompt asks for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvcommons.engine.core import Core
from kvcommons.engine.engine import Engine
from kvcommons.engine.sequence import LocalRun, RemoteRun, Run
from kvcommons.errors import CapacityExhausted, Unavailable
from kvcommons.holder.holder import Holder
from kvcommons.holder.segments import SegmentRef
from kvcommons.pb import common_pb2 as pb
from kvcommons.placement.base import FreeBlocks
from services.decode.arrival.growth_queue import GrowthQueue
from services.decode.borrowing.loans import Loans

PAUSE_S = 0.1  # until one that waits for memory looks again


@dataclass(slots=True, eq=False, kw_only=True)
class GrowingPrompt:
    """What of a sequence is reserved, and what is to come."""

    key: int
    name: str
    head_blocks: int  # a run lies in a truncated sequence's head or behind it
    blocks: int  # that have a place
    needed: int  # for the prompt and the first token
    pieces: deque[int]  # blocks of each holder that is to join
    holders: list[RemoteRun]
    places: list[pb.SegmentPlace] = field(default_factory=list)  # of the runs that joined
    own: list[SegmentRef] = field(default_factory=list)  # segments here, of those
    joining: asyncio.Lock = field(default_factory=asyncio.Lock)


class Growth:
    """Belongs to the event loop."""

    def __init__(
        self,
        core: Core,
        queue: GrowthQueue,
        *,
        engine: Engine,
        holder: Holder,
        loans: Loans,
        data_address: str,
        sequences: Callable[[], int],
        joins: bool = True,
    ) -> None:
        """`sequences`: how many are held here, each of which is left a block to grow. `joins`: whether this
        instance may be one of the holders that join."""
        self._core = core
        self._queue = queue
        self._engine = engine
        self._holder = holder
        self._loans = loans
        self._data_address = data_address
        self._sequences = sequences
        self._joins = joins
        self._growing: dict[int, GrowingPrompt] = {}

    @property
    def any_waits(self) -> bool:
        """A prompt that has begun waits for memory: none that would want more begins meanwhile."""
        return self._queue.any_waits

    @property
    def promised_blocks(self) -> int:
        """That prompts which have begun still want."""
        return sum(prompt.needed - prompt.blocks for prompt in self._growing.values())

    def begin(self, prompt: GrowingPrompt) -> None:
        self._growing[prompt.key] = prompt

    def end(self, key: int) -> None:
        """Its prompt is computed, or nobody wants it any more. Its runs are the sequence's."""
        prompt = self._growing.pop(key, None)
        if prompt is not None:
            self._holder.release(prompt.own)

    async def places(self, key: int, *, known_blocks: int, blocks: int) -> list[pb.SegmentPlace]:
        """Those behind the known ones, once so many leading blocks have a place. Raises CapacityExhausted
        where memory did not come free in time, which ends the sequence; Unavailable where it has ended."""
        prompt = self._growing.get(key)
        if prompt is None:
            return []  # all of it had its place from the beginning
        async with prompt.joining:
            while prompt.blocks < min(blocks, prompt.needed):
                try:
                    runs = await self._await_memory(prompt, blocks - prompt.blocks)
                except CapacityExhausted as error:
                    self._engine.fail(key, error)
                    raise
                self._join(prompt, runs)
        return [place for place in prompt.places if place.first_block >= known_blocks]

    async def _await_memory(self, prompt: GrowingPrompt, least: int) -> list[Run]:
        """Runs of the next piece or, where memory is short, of `least` blocks of it. For a bounded time."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                if self._growing.get(prompt.key) is not prompt:
                    raise Unavailable("the sequence whose prompt is computed has ended")
                if self._queue.may_ask(prompt.key):
                    runs = await self._reserve(prompt, least)
                    if runs and self._growing.get(prompt.key) is prompt:
                        return runs
                    self._give_back(runs)
                self._queue.waits(prompt.key, loop.time())
                if self._queue.gives_up(prompt.key, loop.time()):
                    raise self._short(prompt)
                await asyncio.sleep(PAUSE_S)
        finally:
            self._queue.ended(prompt.key)

    async def _reserve(self, prompt: GrowingPrompt, least: int) -> list[Run]:
        """None where neither others nor this instance have room for `least` blocks."""
        least = min(least, prompt.pieces[0])
        for blocks in dict.fromkeys((prompt.pieces[0], least)):
            try:
                return await self._borrow(prompt, range(prompt.blocks, prompt.blocks + blocks))
            except CapacityExhausted:
                continue
        # What this instance has beyond its own share is better than to wait.
        free = FreeBlocks(free_blocks=self._core.allocator.free, sequences=self._sequences())
        if not self._joins or free.beside_others() < least:
            return []
        try:
            return [LocalRun(first_block=prompt.blocks, blocks=self._core.allocator.allocate(least))]
        except CapacityExhausted:  # the engine's thread was quicker
            return []

    async def _borrow(self, prompt: GrowingPrompt, blocks: range) -> list[Run]:
        """On a holder that has none of it yet, if there is one."""
        runs: list[RemoteRun] = []
        try:
            for part in split(blocks, prompt.head_blocks):
                runs += await self._loans.borrow(
                    prompt.key,
                    prompt.name,
                    blocks=len(part),
                    first_block=part.start,
                    avoid=[run.holder for run in (*prompt.holders, *runs)],
                )
        except BaseException:
            self._loans.give_back(runs)
            raise
        return [*runs]

    def _join(self, prompt: GrowingPrompt, runs: Iterable[Run]) -> None:
        """All of them are of one piece."""
        for run in runs:
            if isinstance(run, RemoteRun):
                prompt.holders.append(run)
                prompt.places.append(run.place())
            else:
                prompt.places.append(self._own_place(prompt, run))
            prompt.blocks += run.count
            prompt.pieces[0] -= run.count
            self._engine.grown(prompt.key, run)
        if not prompt.pieces[0]:
            prompt.pieces.popleft()

    def _give_back(self, runs: Iterable[Run]) -> None:
        for run in runs:
            if isinstance(run, RemoteRun):
                self._loans.give_back([run])
            else:
                self._core.allocator.release(run.blocks)

    def _own_place(self, prompt: GrowingPrompt, run: LocalRun) -> pb.SegmentPlace:
        position = run.first_block * self._core.block_tokens
        ref = self._holder.own(prompt.name, run.blocks, first_position=position)
        prompt.own.append(ref)
        return pb.SegmentPlace(
            data_address=self._data_address,
            handle=ref.handle,
            epoch=ref.epoch,
            first_block=run.first_block,
            blocks=run.count,
        )

    def _short(self, prompt: GrowingPrompt) -> CapacityExhausted:
        missing = prompt.needed - prompt.blocks
        return CapacityExhausted(
            f"the prompt has room for {prompt.blocks} of its {prompt.needed} blocks of KV, and nobody has "
            f"lent it another in time: {missing} are missing, which is {missing * self._core.block_tokens} "
            f"tokens; retry later, or add an attention_pool instance{self._loans.shortfall}",
            retry_after_ms=500,
        )


def split(blocks: range, at: int) -> list[range]:
    """The parts of `blocks` before and after block `at`, without empty ones."""
    parts = (range(blocks.start, min(at, blocks.stop)), range(max(at, blocks.start), blocks.stop))
    return [part for part in parts if part]
