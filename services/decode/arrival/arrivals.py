"""Sequences from their reservation to their first token: blocks here and elsewhere, the history that decode
loads, and the start."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec

from kvcommons.engine.callbacks import SequenceUpdate
from kvcommons.engine.core import Core
from kvcommons.engine.engine import Engine
from kvcommons.engine.history import Histories, Load
from kvcommons.engine.prompt import FirstToken
from kvcommons.engine.request import Request
from kvcommons.engine.sequence import LocalRun, RemoteRun, Run, Sequence
from kvcommons.errors import CapacityExhausted, KVCommonsError, Overloaded, Unavailable
from kvcommons.holder.holder import Holder
from kvcommons.holder.segments import SegmentRef
from kvcommons.pb import common_pb2 as pb
from kvcommons.placement.base import FreeBlocks, Placement, SequenceLayout
from kvcommons.stages.group import StageGroup
from kvcommons.transport.deadline import Deadline
from services.decode.arrival.growth import GrowingPrompt, Growth, split
from services.decode.arrival.local_prefill import LocalPrefill, LocalSink
from services.decode.arrival.start_barrier import PushFrom, StartBarrier, StartGeneration
from services.decode.batching.stream import EventStream
from services.decode.borrowing.loans import Loans

log = logging.getLogger(__name__)

P = ParamSpec("P")

FETCHES_MAX = 16  # fetches that wait for a kvstore at the same time
# How long a fetch may go on once prefill has delivered: a shorter pause does not mean that it hangs.
PATIENCE_S_MIN = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedPiece:
    """Blocks of the history that lie in one run: `first` is an index within it."""

    run: Run
    first: int
    ids: tuple[bytes, ...]


def pieces_of(runs: list[Run], ids: list[bytes], begin: int, end: int) -> list[FetchedPiece]:
    """Blocks [begin, end) of a sequence, by the run that they lie in, in order."""
    found = []
    for run in runs:
        first, last = max(begin, run.first_block), min(end, run.first_block + run.count)
        if first < last:
            found.append(FetchedPiece(run=run, first=first - run.first_block, ids=tuple(ids[first:last])))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reserved:
    """Runs for a prompt and its first token, or for the beginning of that."""

    runs: list[Run]
    found: int  # leading blocks that were known here already
    placement: Placement  # that placed them
    later: tuple[int, ...]  # blocks of each holder that is to join


class Arrival:
    """One sequence that is reserved or runs. Belongs to the event loop."""

    def __init__(
        self,
        sequence: Sequence,
        ref: SegmentRef,
        placements: list[pb.SegmentPlace],
        push_from: int,
        stream: EventStream,
        start_wait_s: float,
        *,
        computes: bool = False,
    ) -> None:
        self.sequence = sequence
        self.computes = computes  # whether its prompt is computed here
        self.start_wait_s = start_wait_s
        self.ref = ref  # the local segment that prefill writes to until the start
        self.placements = placements
        self.tell_stages: Callable[[], None] = lambda: None  # of it, once its prompt is to come from prefill
        self.came_apart: Callable[[], KVCommonsError | None] = lambda: None  # why stages know of it no more
        self.push_from_block = push_from
        self.stream = stream
        self.barrier: StartBarrier
        # The number of leading blocks that are here once the fetch has ended; None where the sequence ends
        # before.
        self.present: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self.timer: asyncio.TimerHandle | None = None
        self.fetch: asyncio.Task[None] | None = None
        self.loads: list[Load] = []  # of the fetch, to this instance
        self.opened_s = time.monotonic()
        self.change = 0  # the number of its reservation among the changes of this instance
        self.end_change: int | None = None


class Arrivals:
    """Reserves blocks for sequences, starts them, and frees what they held. Belongs to the event loop."""

    def __init__(
        self,
        core: Core,
        *,
        placement: Placement,
        data_address: str,
        fetch_deadline_s: float,
        fetch_min_bytes: int,
        engine: Engine,
        holder: Holder,
        histories: Histories,
        loans: Loans,
        growth: Growth,
        local: LocalPrefill | None = None,
        stages: StageGroup | None = None,
    ) -> None:
        """`local` computes prompts here; None where prefill computes all. `stages`: the others, where this is
        the first of several."""
        self._core = core
        self._local = local
        self._stages = stages
        self._loop = asyncio.get_running_loop()
        self._placement = placement
        self._data_address = data_address
        self._fetch_deadline_s = fetch_deadline_s
        self._fetch_min_blocks = max(1, -(-fetch_min_bytes // core.layout.block_bytes))
        self._engine = engine
        self._holder = holder
        self._histories = histories
        self._loans = loans
        self._growth = growth
        self._threads = ThreadPoolExecutor(FETCHES_MAX, thread_name_prefix="decode-fetch")
        self._by_key: dict[int, Arrival] = {}
        self._by_handle: dict[int, Arrival] = {}
        self.changes = 0  # reservations and ends until now

    def __len__(self) -> int:
        return len(self._by_key)

    def close(self) -> None:
        self._threads.shutdown()

    def find(self, key: int) -> Arrival | None:
        return self._by_key.get(key)

    async def open(
        self, request: Request, job: pb.Job, stream: EventStream, *, start_wait_s: float
    ) -> Arrival:
        """Of a request, which is checked, and came as this job; `stream` gets its events. Reserves blocks and
        begins to fetch the history. Prefill has `start_wait_s` to deliver. Raises CapacityExhausted, and
        Loading or Unavailable where stages are missing, and holds nothing then."""
        if self._stages is not None:
            await self._stages.prepared(request)
        with self._engine.reserving():
            return await self._open(request, job, stream, start_wait_s=start_wait_s)

    async def _open(
        self, request: Request, job: pb.Job, stream: EventStream, *, start_wait_s: float
    ) -> Arrival:
        core, key = self._core, self._engine.new_key()
        formed = self._stages.check() if self._stages is not None else None  # before anything is found
        chain = request.chain(core.info)
        ids = list(chain.ids)
        reusable = ids[: request.reusable(core.block_tokens)]
        matched = min(request.matched_blocks, len(reusable)) if request.store_data else 0
        reserved = await self._reserve(key, request, reusable, matched)
        runs, found = reserved.runs, reserved.found
        sequence = Sequence(
            key=key,
            request=request,
            block_tokens=core.block_tokens,
            chain=chain,
            placement=reserved.placement,
            constraint=core.constraint(request),
        )
        ref, placements = self._placements(request, runs, found)
        if self._stages is not None and formed is not None:
            placements[0].stages.extend(self._stages.places(formed, key, placements[0]))
        for run in runs:
            sequence.append_run(run)  # which joins those that follow each other
        # A few blocks cost less as a part of what prefill pushes than as a message of their own.
        push_from = matched if matched - found >= self._fetch_min_blocks else found
        local = self._local is not None and self._local.takes(sequence, max(found, matched))
        if local:
            push_from = found  # the engine loads the rest of the history
        arrival = Arrival(sequence, ref, placements, push_from, stream, start_wait_s, computes=local)
        arrival.barrier = StartBarrier(push_from_block=push_from, fetching=push_from > found)
        self._by_key[key] = self._by_handle[ref.handle] = arrival
        if reserved.later:
            self._growth.begin(
                GrowingPrompt(
                    key=key,
                    name=request.request_id,
                    head_blocks=sequence.head_blocks,
                    blocks=sequence.blocks,
                    needed=sequence.blocks + sum(reserved.later),
                    pieces=deque(reserved.later),
                    holders=sequence.remote_runs(),
                )
            )
        self.changes += 1
        arrival.change = self.changes
        stages = self._stages
        if stages is not None and formed is not None:
            arrival.tell_stages = partial(stages.reserve, formed, sequence, job, shared_blocks=found)
            arrival.came_apart = partial(stages.came_apart, formed)
        if self._local is not None and local:
            sink = LocalSink(
                sequence,
                self._in_loop(self._prefilled),
                self._in_loop(self._fall_back),
                job=job,
                came_apart=arrival.came_apart,
            )
            self._local.submit(sequence, sink, wait_s=start_wait_s)
        else:
            self._engine.add(sequence)
            arrival.tell_stages()
            self._expect(arrival)
        if push_from == found:
            arrival.present.set_result(found)
        else:
            arrival.fetch = asyncio.create_task(self._fetch(arrival, ids, found), name="fetch")
        return arrival

    def started(self, handle: int, first: pb.SampledToken, pushed_from_block: int) -> None:
        """Prefill has delivered (StartSequence)."""
        arrival = self._by_handle.get(handle)
        if arrival is None:
            return
        self._act(arrival, arrival.barrier.started(first, pushed_from_block))
        if arrival.loads and not arrival.present.done():
            # The fetch gets as long again as it had. After that prefill pushes those blocks: it has them
            # anyway, so that costs it little.
            patience_s = max(time.monotonic() - arrival.opened_s, PATIENCE_S_MIN)
            asyncio.get_running_loop().call_later(patience_s, self._cut_short, arrival)

    def _in_loop(self, work: Callable[P, None]) -> Callable[P, None]:
        """`work`, to be called from any thread."""

        def call(*args: P.args, **kwargs: P.kwargs) -> None:
            with suppress(RuntimeError):  # the loop is closed: the process is ending
                self._loop.call_soon_threadsafe(partial(work, *args, **kwargs))

        return call

    def _prefilled(self, key: int, result: FirstToken | KVCommonsError) -> None:
        """The result of a prompt that was computed here."""
        arrival = self._by_key.get(key)
        if arrival is None:
            return
        if isinstance(result, FirstToken):
            assert self._local is not None
            self._local.ended(arrival.sequence, result)
            self._close_barrier(arrival)
            arrival.stream.prefilled(result)
        else:
            arrival.stream.step(SequenceUpdate(key=key, error=result))

    def _fall_back(self, sequence: Sequence) -> None:
        """The engine does not take a prompt that was to be computed here: prefill computes it."""
        self._engine.add(sequence)
        arrival = self._by_key.get(sequence.key)
        if arrival is None:  # the call has ended meanwhile
            self._engine.cancel(sequence.key)
            return
        gone = arrival.came_apart()
        if gone is not None:  # prefill has nowhere to write to
            self._engine.fail(sequence.key, gone)
            return
        arrival.tell_stages()
        self._expect(arrival)
        arrival.stream.missing(arrival.push_from_block)

    async def history(self, handle: int) -> int:
        """Leading blocks that lie at the sequence's placements, once what decode fetches has come. Raises
        Unavailable where the sequence has ended, or begun."""
        present = None
        arrival = self._by_handle.get(handle)
        if arrival is not None:
            arrival.barrier.awaited()
            present = await asyncio.shield(arrival.present)
        if present is None:
            raise Unavailable(f"no sequence waits for its prompt at segment {handle}")
        return present

    async def places(self, handle: int, *, known_blocks: int, blocks: int) -> list[pb.SegmentPlace]:
        """As `Growth.places`."""
        arrival = self._by_handle.get(handle)
        if arrival is None:
            raise Unavailable(f"no sequence waits for its prompt at segment {handle}")
        return await self._growth.places(arrival.sequence.key, known_blocks=known_blocks, blocks=blocks)

    def ended(self, arrival: Arrival) -> int:
        """The sequence holds nothing any more, or will not in a moment: the number of that change."""
        if arrival.end_change is None:
            self.changes += 1
            arrival.end_change = self.changes
        return arrival.end_change

    def leave(self, arrival: Arrival) -> None:
        """The call is over, whatever became of it."""
        self.ended(arrival)
        self._by_key.pop(arrival.sequence.key, None)
        self._close_barrier(arrival)
        if arrival.fetch is not None:
            arrival.fetch.cancel()
        if not arrival.present.done():
            arrival.present.set_result(None)
        if not arrival.stream.ended:
            self._engine.cancel(arrival.sequence.key)

    async def _reserve(self, key: int, request: Request, reusable: list[bytes], matched: int) -> _Reserved:
        """Room for the prompt and the first token or, where holders join as it grows, for `matched` blocks at
        least."""
        try:
            return await self._reserve_by(self._placement, key, request, reusable, matched)
        except CapacityExhausted:
            otherwise = self._placement.otherwise()
            if otherwise is None:
                raise
        return await self._reserve_by(otherwise, key, request, reusable, matched)

    async def _reserve_by(
        self, policy: Placement, key: int, request: Request, reusable: list[bytes], matched: int
    ) -> _Reserved:
        allocator = self._core.allocator
        needed = self._core.layout.blocks_of(len(request.tokens) + 1)
        held = allocator.match(reusable)
        found = len(held)
        remote: list[RemoteRun] = []
        runs: list[Run] = [LocalRun(first_block=0, blocks=held[:found])] if found else []
        try:
            placement, layout = self._place(policy, needed, found)
            if found and any(piece.away for piece in layout.pieces):
                # Prefill may have to attend over all of it, so its addresses name all of it.
                allocator.release(held)
                held, found, runs = [], 0, []
                placement, layout = self._place(policy, needed, found)
            if layout.grows and len(layout.pieces) > 1 and self._growth.any_waits:
                raise Overloaded(
                    "an earlier prompt has begun and waits for memory: retry later",
                    retry_after_ms=500,
                )
            local = allocator.allocate(layout.local_blocks)
            held = held + local
            at, later = found, []
            for piece in layout.pieces:
                if piece.away and layout.grows and runs and at >= matched:
                    later.append(piece.blocks)
                elif piece.away:
                    part = await self._borrow(key, request, range(at, at + piece.blocks), layout, remote)
                    remote += part
                    runs += part
                else:
                    runs.append(LocalRun(first_block=at, blocks=local))
                at = runs[-1].first_block + runs[-1].count
        except BaseException:
            self._loans.give_back(remote)
            allocator.release(held)
            raise
        return _Reserved(runs=runs, found=found, placement=placement, later=tuple(later))

    def _place(self, policy: Placement, needed: int, found: int) -> tuple[Placement, SequenceLayout]:
        free = FreeBlocks(free_blocks=self._core.allocator.free, sequences=len(self._by_key))
        blocks = needed - found
        placement = policy.of(blocks=blocks, found=found, free=free)
        return placement, placement.arrive(blocks=blocks, found=found, free=free)

    async def _borrow(
        self, key: int, request: Request, blocks: range, layout: SequenceLayout, so_far: list[RemoteRun]
    ) -> list[RemoteRun]:
        """One piece; a run lies in a truncated sequence's head or behind it."""
        head = request.truncated.shifted_head_tokens // self._core.block_tokens
        runs: list[RemoteRun] = []
        try:
            for part in split(blocks, head):
                runs += await self._loans.borrow(
                    key,
                    request.request_id,
                    blocks=len(part),
                    first_block=part.start,
                    avoid=[run.holder for run in so_far] if layout.spread else (),
                    balance=layout.balance,
                )
        except BaseException:
            self._loans.give_back(runs)
            raise
        return runs

    def _placements(
        self, request: Request, runs: list[Run], found: int
    ) -> tuple[SegmentRef, list[pb.SegmentPlace]]:
        """Where prefill writes and, where the prompt is more than it has room for, attends: the first is this
        holder's own, of no block where all lie elsewhere."""
        local = [run for run in runs if isinstance(run, LocalRun)]
        own = [block for run in local for block in run.blocks]
        first = local[0].first_block if local else runs[-1].first_block + runs[-1].count
        position = first * self._core.block_tokens
        ref = self._holder.own(request.request_id, own, first_position=position, shared_blocks=found)
        placements = [
            pb.SegmentPlace(
                data_address=self._data_address,
                handle=ref.handle,
                epoch=ref.epoch,
                first_block=first,
                blocks=len(own),
            )
        ]
        placements += [run.place() for run in runs if isinstance(run, RemoteRun)]
        return ref, placements

    def _cut_short(self, arrival: Arrival) -> None:
        """A fetch that falls behind ends with what has come."""
        loop = asyncio.get_running_loop()
        for load in arrival.loads:
            loop.run_in_executor(None, load.cancel)  # which waits for a copy under way

    async def _fetch(self, arrival: Arrival, ids: list[bytes], found: int) -> None:
        """History that lies before `push_from_block`, each holder its part, all at once."""
        wanted = pieces_of(arrival.sequence.runs, ids, found, arrival.push_from_block)
        counts = await asyncio.gather(*(self._fetch_piece(arrival, piece) for piece in wanted))
        present = found
        for piece, count in zip(wanted, counts, strict=True):
            present += count
            if count < len(piece.ids):
                break
        if not arrival.present.done():
            arrival.present.set_result(present)
        self._act(arrival, arrival.barrier.fetched(present))

    async def _fetch_piece(self, arrival: Arrival, piece: FetchedPiece) -> int:
        """How many leading blocks of it are there."""
        request = arrival.sequence.request
        try:
            if isinstance(piece.run, RemoteRun):
                return await piece.run.holder.load(
                    piece.run.ref,
                    request.store_data,
                    piece.ids,
                    first_block=piece.first,
                    store_control=request.store_control,
                    timeout_s=self._fetch_deadline_s,
                )
            blocks = piece.run.blocks[piece.first : piece.first + len(piece.ids)]
            return await self._load_here(arrival, request.store_data, piece.ids, blocks)
        except KVCommonsError as error:
            log.warning("history was not loaded: %s", error.message)
            return 0

    async def _load_here(
        self, arrival: Arrival, store: str, ids: tuple[bytes, ...], blocks: list[int]
    ) -> int:
        """The blocks are pinned for as long as anything may write to them, whoever lets go of them
        meanwhile."""
        allocator = self._core.allocator
        deadline = Deadline.after(self._fetch_deadline_s)
        allocator.retain(blocks)
        try:
            load = self._histories.load(store=store, ids=ids, blocks=blocks, deadline=deadline)

            def finish() -> int:
                try:
                    return load.wait(self._core.layers[-1], deadline)
                finally:
                    load.cancel()
                    allocator.release(blocks)

            finishing = self._threads.submit(finish)
            arrival.loads.append(load)
        except BaseException:
            allocator.release(blocks)
            raise
        try:
            # Shielded: what is cancelled before a thread begins it would let go of nothing.
            return await asyncio.shield(asyncio.wrap_future(finishing))
        except asyncio.CancelledError:
            load.cancel()  # wakes the thread
            raise

    def _act(self, arrival: Arrival, action: PushFrom | StartGeneration | None) -> None:
        if isinstance(action, PushFrom):
            self._expect(arrival)
            arrival.stream.missing(action.push_from_block)
        elif isinstance(action, StartGeneration):
            self._close_barrier(arrival)
            self._engine.begin(arrival.sequence.key, action.first)

    def _expect(self, arrival: Arrival) -> None:
        """Waits for prefill, a bounded time from now on."""
        if arrival.timer is not None:
            arrival.timer.cancel()
        wait_s = arrival.start_wait_s
        error = Unavailable(f"prefill did not deliver the prompt within {wait_s:g} s")
        arrival.timer = asyncio.get_running_loop().call_later(
            wait_s, self._engine.fail, arrival.sequence.key, error
        )

    def _close_barrier(self, arrival: Arrival) -> None:
        """Prefill has nothing more to write here."""
        if arrival.timer is not None:
            arrival.timer.cancel()
        self._growth.end(arrival.sequence.key)
        if self._by_handle.pop(arrival.ref.handle, None) is not None:
            self._holder.release([arrival.ref])
