"""The engine of an instance of the simulated commons: iterations of sequences whose KV says what it is of, in
memory that says what was written to it. What moves and borrows beside it are the classes that serve."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcommons.engine.callbacks import Movable
from kvcommons.engine.request import Request
from kvcommons.engine.sequence import LocalRun, RemoteRun, Run, Sequence
from kvcommons.errors import CapacityExhausted, KVCommonsError
from kvcommons.holder.head_group import Creditor
from kvcommons.holder.segments import SegmentRef
from kvcommons.model.sampling import SamplingParams
from kvcommons.rblock.identity import IdentityChain
from kvcommons.rblock.layout import Layout
from services.decode.arrival.growth import GrowingPrompt
from tests.simulation.machine import require

if TYPE_CHECKING:
    from tests.simulation.commons_instance import Instance

BLOCK_TOKENS = 2
MODEL = b"m"
SALT = bytes(32)
LAYOUT = Layout(
    layers=1, kv_heads=1, block_tokens=BLOCK_TOKENS, head_dim=1, kv_dtype="float32", query_heads=1
)
ATTEND_S = 5.0
BORROW_BLOCKS = 2

Content = tuple[int, int, int]  # sequence, index of the block in it, tokens
Writes = tuple[tuple[int, Content], ...]  # to blocks of a segment


class Buffer:
    """One block of a Memory, to be written."""

    def __init__(self, memory: Memory, block: int) -> None:
        self._memory = memory
        self._block = block

    def write(self, content: Content | None) -> None:
        self._memory.contents[self._block] = content


class Memory:
    """What each block has, in place of KV: as far as BlockMemory is used to move it."""

    layout = LAYOUT

    def __init__(self, blocks: int, writing: Callable[[list[int]], None]) -> None:
        """`writing` is told what the thread that runs writes to, until it ends."""
        self.contents: list[Content | None] = [None] * blocks
        self._writing = writing

    @contextmanager
    def write_buffers(self, layer: int, blocks: Items[int]) -> Iterator[list[Buffer]]:
        self._writing(list(blocks))
        yield [Buffer(self, block) for block in blocks]


@dataclass(slots=True, eq=False)
class Running:
    """A sequence of the engine's."""

    sequence: Sequence
    busy: bool = False  # an iteration is under way, or its prompt
    growing: bool = False
    ending: bool = False
    border: list[Callable[[], None]] = field(default_factory=list)  # to be done when the iteration has ended

    @property
    def key(self) -> int:
        return self.sequence.key

    def content(self, index: int) -> Content:
        """Of a block, once all tokens have KV."""
        return self.key, index, min(BLOCK_TOKENS, len(self.sequence.tokens) - index * BLOCK_TOKENS)


class SimulatedEngine:
    """An Engine to those that move KV and borrow; commands come one after the other, as its thread takes
    them."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self.running: dict[int, Running] = {}
        self.switching: list[Run] = []  # what is to be switched to
        self.joining: list[Run] = []  # what sequences are to have
        self.recomputed = 0
        self.waiting = 0  # sequences that found no room since the last heartbeat
        self._commands: deque[Callable[[], None]] = deque()

    # ---- as the engine

    def survey(self, holder: Creditor | None = None) -> Future[list[Movable]]:
        answer: Future[list[Movable]] = Future()
        self._post(lambda: answer.set_result(self._survey(holder)))
        return answer

    def switch(self, move: Movable, moved: Run, ref: SegmentRef) -> Future[float | None]:
        answer: Future[float | None] = Future()
        self.switching.append(moved)
        self._post(lambda: self._switch(move, moved, ref, answer))
        return answer

    def fail(self, key: int, error: KVCommonsError) -> None:
        self._post(lambda: self._fail(key))

    def grown(self, key: int, run: Run) -> None:
        self.joining.append(run)
        self._post(lambda: self._grown(key, run))

    # ---- what its sequences do

    def sequence(self, key: int, tokens: int) -> Running:
        request = Request(
            request_id=str(key),
            session_id="",
            tenant="",
            salt=SALT,
            tokens=(0,) * tokens,
            prompt_tokens=tokens,
            max_position=1 << 20,
            sampling=SamplingParams(),
            store_control="",
            store_data="",
            matched_blocks=0,
            no_reuse=True,
        )
        chain = IdentityChain(SALT, MODEL, BLOCK_TOKENS)
        one = Running(Sequence(key=key, request=request, block_tokens=BLOCK_TOKENS, chain=chain))
        self.running[key] = one
        return one

    async def begin(self, key: int, tokens: int) -> None:
        """A sequence with a prompt of so many tokens, which is computed here."""
        one, dice = self.sequence(key, tokens), self._instance.world.dice
        one.busy = True
        needed = LAYOUT.blocks_of(tokens + 1)
        free = self._instance.room()
        here = min(needed, free) if dice.random() < 0.6 else dice.randint(0, min(needed, free))
        pieces = [(False, here), (True, needed - here)]
        dice.shuffle(pieces)
        try:
            for away, blocks in pieces:
                if blocks:
                    await self._place(one, away, blocks)
        except CapacityExhausted:
            self.waiting += 1
            one.ending = True
            self.reach_border(one)
            return
        await self.prefill(one)

    async def begin_growing(self, key: int, tokens: int) -> None:
        """Likewise, but only a part of its memory is there at first: the rest joins while chunks are
        computed, by decode's own class."""
        growth, dice, needed = self._instance.growth, self._instance.world.dice, LAYOUT.blocks_of(tokens + 1)
        if growth.any_waits:
            self.waiting += 1
            return
        one = self.sequence(key, tokens)
        one.busy = True
        try:
            await self._place(one, dice.random() < 0.5, dice.randint(1, max(needed // 2, 1)))
            growth.begin(self._growing(one, needed))
            await self._compute_growing(one, needed)
            if not one.ending:
                one.sequence.start(0)
        except CapacityExhausted:
            self.waiting += 1
            one.ending = True
        except KVCommonsError:  # it has ended meanwhile
            one.ending = True
        growth.end(key)
        self.reach_border(one)

    async def prefill(self, one: Running) -> None:
        """The KV of all of its prompt is written, and its first token follows."""
        if await self._access(one, written=range(one.sequence.blocks), read=0):
            one.sequence.start(0)
        else:
            self._lose(one)
        self.reach_border(one)

    async def iterate(self, one: Running) -> None:
        """One token: its KV is appended, and all KV before it is met."""
        if one.busy or one.growing or one.key not in self.running:
            return
        if one.sequence.full:
            await self._grow(one)
            return
        one.busy = True
        last = (len(one.sequence.tokens) - 1) // BLOCK_TOKENS
        if await self._access(one, written=range(last, last + 1), read=last + 1):
            one.sequence.append(0)
        else:
            self._lose(one)
        self.reach_border(one)
        if self._instance.world.dice.random() < 0.5:
            await self.iterate(one)

    def end(self, one: Running) -> None:
        """It has its answer, or its client goes away: at the iteration's border."""
        one.ending = True
        self._instance.growth.end(one.key)
        if not one.busy:
            self.reach_border(one)

    def end_uncertain(self) -> None:
        """Sequences that may have been lent more than they know of: it is given back with the rest."""
        for one in list(self.running.values()):
            if any(run.ref in self._instance.unheard for run in one.sequence.remote_runs()):
                self.end(one)

    def reach_border(self, one: Running) -> None:
        one.busy = False
        if one.ending and self.running.pop(one.key, None) is not None:
            self._instance.allocator.release(one.sequence.local_blocks())
            self._instance.loans.give_back(one.sequence.remote_runs())
        waiting, one.border = one.border, []
        for command in waiting:
            command()

    def _growing(self, one: Running, needed: int) -> GrowingPrompt:
        left, pieces = needed - one.sequence.blocks, deque[int]()
        while left:
            pieces.append(self._instance.world.dice.randint(1, min(left, 3)))
            left -= pieces[-1]
        return GrowingPrompt(
            key=one.key,
            name=str(one.key),
            head_blocks=0,
            blocks=one.sequence.blocks,
            needed=needed,
            pieces=pieces,
            holders=one.sequence.remote_runs(),
        )

    async def _compute_growing(self, one: Running, needed: int) -> None:
        """Chunk by chunk, each once it has a place."""
        computed, known = 0, one.sequence.blocks
        while computed < needed and not one.ending:
            chunk = range(computed, min(computed + self._instance.world.dice.randint(1, 3), needed))
            places = await self._instance.growth.places(one.key, known_blocks=known, blocks=chunk.stop)
            known += sum(place.blocks for place in places)
            require(known >= chunk.stop, "a chunk of a prompt that grows has no place")
            while one.sequence.blocks < chunk.stop and not one.ending:
                await asyncio.sleep(0.01)  # until the engine knows of them
            if not one.ending and not await self._access(one, written=chunk, read=computed):
                self._lose(one)
            computed = chunk.stop

    async def _place(self, one: Running, away: bool, blocks: int) -> None:
        sequence = one.sequence
        if not away:
            taken = self._instance.allocator.allocate(blocks)
            sequence.append_run(LocalRun(first_block=sequence.blocks, blocks=taken))
            return
        for run in await self._instance.loans.borrow(
            one.key, str(one.key), blocks=blocks, first_block=sequence.blocks
        ):
            sequence.append_run(run)

    async def _grow(self, one: Running) -> None:
        """As the engine's callbacks do it."""
        sequence, dice = one.sequence, self._instance.world.dice
        if self._instance.room() > 0 and dice.random() < 0.3:
            await self._place(one, False, 1)
            return
        one.growing = True
        tail = sequence.tail if isinstance(sequence.tail, RemoteRun) and dice.random() < 0.9 else None
        try:
            run = await self._instance.loans.extend(
                one.key,
                str(one.key),
                tail=tail,
                blocks=dice.randint(1, BORROW_BLOCKS),
                first_block=sequence.blocks,
            )
        except CapacityExhausted:
            self.waiting += 1
            one.growing = False
        else:
            self.grown(one.key, run)

    async def _access(self, one: Running, *, written: range, read: int) -> bool:
        """Writes these blocks of the sequence and reads so many from its first one on, at all that have some
        of them. Whether all answered."""
        sequence, memory = one.sequence, self._instance.memory
        calls, here = [], []
        for run in sequence.runs:
            mine = range(run.first_block, run.first_block + run.count)
            used = max(0, min(run.count, read - run.first_block))
            contents = [(index - mine.start, one.content(index)) for index in written if index in mine]
            if isinstance(run, LocalRun):
                for at, content in contents:
                    memory.contents[run.blocks[at]] = content
                here.append((mine.start, run.blocks[:used]))
            elif used or contents:
                first = run.segment_block
                writes = tuple((first + at, content) for at, content in contents)
                calls.append(self._attend(mine.start, run, used, writes))
        answers = await asyncio.gather(*calls)
        if any(answer is None for answer in answers):
            return False
        found = [(first, [memory.contents[block] for block in blocks]) for first, blocks in here]
        seen = [content for _, contents in sorted([*found, *answers]) for content in contents]
        expected = [one.content(index) for index in range(read)]
        require(seen == expected, f"{self._instance.name} reads {seen} where {expected} was written")
        return True

    async def _attend(
        self, first: int, run: RemoteRun, used: int, writes: Writes
    ) -> tuple[int, list[Content | None]] | None:
        try:
            asked = run.ref, run.segment_block, used, writes
            return first, await self._instance.call(
                run.holder.data_address, "Attend", *asked, timeout_s=ATTEND_S
            )
        except KVCommonsError:
            return None

    # ---- its thread

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        if self._instance.world.dice.random() < 0.6:  # it has nothing else to do just now
            self._instance.loop.call_soon(self._next_command)
        else:
            self._instance.world.post(self._instance, self._next_command)

    def _next_command(self) -> None:
        self._commands.popleft()()

    def _survey(self, holder: Creditor | None) -> list[Movable]:
        return [
            Movable.of(one.sequence, run)
            for _, one in sorted(self.running.items())
            for run in one.sequence.remote_runs()
            if (holder is None or run.holder is holder) and one.sequence.movable(run)
        ]

    def _switch(self, move: Movable, moved: Run, ref: SegmentRef, answer: Future[float | None]) -> None:
        one = self.running.get(move.key)
        if one is not None and one.busy:
            one.border.append(lambda: self._switch(move, moved, ref, answer))
            return
        self.switching = [run for run in self.switching if run is not moved]
        switched = one is not None and one.sequence.move(move.run, moved, ref)
        answer.set_result(0.0 if switched else None)

    def _fail(self, key: int) -> None:
        one = self.running.get(key)
        if one is not None:
            self._lose(one)
            if not one.busy:
                self.reach_border(one)

    def _grown(self, key: int, run: Run) -> None:
        self.joining = [other for other in self.joining if other is not run]
        one = self.running.get(key)
        if one is None:
            if isinstance(run, RemoteRun):
                self._instance.loans.give_back([run])
            else:
                self._instance.allocator.release(run.blocks)
            return
        one.growing = False
        one.sequence.append_run(run)

    def _lose(self, one: Running) -> None:
        """Some of its KV is gone: it is computed again, as another sequence."""
        if not one.ending:
            self.recomputed += 1
        one.ending = True
