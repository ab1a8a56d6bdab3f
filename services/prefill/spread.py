"""Prompts beyond this instance's memory: their KV lies where decode will attend over it, from the first chunk
on (Infinite-LLM, section 4.6: blocks are planned ahead from the prompt's length).

A chunk's own blocks are here while it is computed, and go out layer by layer meanwhile. What came before them
is attended over where it lies: the chunk's queries go there, partials come back. So history that is there
already, or that decode fetches, is neither computed nor seen here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from kvcommons.attention.partial import Partial, merge
from kvcommons.engine.chunk import Chunk
from kvcommons.engine.core import Core
from kvcommons.errors import KVCommonsError, Unavailable
from kvcommons.holder.attend_call import AttendPart, begin_attend
from kvcommons.holder.creditor import PendingAttention
from kvcommons.holder.head_attention import begin_heads
from kvcommons.holder.segments import SegmentRef
from kvcommons.pb import data_pb2
from kvcommons.rblock.allocator import BlockAllocator
from kvcommons.rblock.heads import divided
from kvcommons.rblock.layout import Layout
from kvcommons.transport.base import Observer
from kvcommons.transport.client import DataClient
from kvcommons.transport.deadline import Deadline
from services.prefill.job import Job, Target

log = logging.getLogger(__name__)

NOT_HERE = -1  # in a job's blocks


class Holders:
    """Connections to the holders of spread prompts. Used by the engine's thread."""

    def __init__(self, layout: Layout, *, attend_deadline_s: float, observer: Observer | None = None) -> None:
        """`attend_deadline_s`: what one layer of a chunk waits for them."""
        self._layout = layout
        self._attend_deadline_s = attend_deadline_s
        self._observer = observer
        self._clients: dict[str, DataClient] = {}

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def ask(self, job: Job, layer: int, before: int, q: Tensor) -> list[PendingAttention]:
        """Partials of queries q [T, H, D], at positions from `before` on, over the tokens before that."""
        deadline = Deadline.after(self._attend_deadline_s)
        asked: list[PendingAttention] = []
        try:
            for target in job.targets:
                length = min((target.first_block + target.blocks) * job.block_tokens, before)
                length -= target.first_block * job.block_tokens
                if length > 0:
                    asked.append(self._ask(target, layer, before, length, q, deadline))
        except BaseException:
            for call in asked:
                call.cancel()
            raise
        return asked

    def _ask(
        self, target: Target, layer: int, before: int, length: int, q: Tensor, deadline: Deadline
    ) -> PendingAttention:
        asks, wordings = [], []
        for place in target.places:
            ref = SegmentRef(handle=place.handle, epoch=place.epoch)
            part = AttendPart(ref=ref, rows=q.shape[0], first_position=before, length=length)
            asks.append(partial(begin_attend, self._client(place.data_address)))
            wordings.append([part])
        if len(asks) == 1:
            return asks[0](layer, wordings[0], q, [], deadline)
        return begin_heads(self._layout, divided(len(asks)), asks, layer, wordings, q, [], deadline)

    def _client(self, address: str) -> DataClient:
        """An address that many prompts used keeps its connection; there are as many as holders."""
        if address not in self._clients:
            self._clients[address] = DataClient(address, observer=self._observer)
        return self._clients[address]


class SpreadChunk(Chunk):
    """A chunk of a spread job: `blocks` has those of its own positions; what is before them is elsewhere."""

    def __init__(
        self, core: Core, tokens: Sequence[int], positions: range, job: Job, holders: Holders
    ) -> None:
        super().__init__(core, tokens, positions, job.blocks, job.request.truncated)
        self._before = positions.start
        self._job = job
        self._holders = holders

    def _attention_over(self, layer: int) -> Tensor:
        """The holders compute while this instance does."""
        query = self._state.q
        try:
            asked = self._holders.ask(self._job, layer, self._before, query) if self._before else []
            here = self._attend_to(layer, range(self._before, self._length), query)
            return merge([here, *(self._finish(call, query) for call in asked)]).out
        except KVCommonsError as error:
            raise Unavailable(f"a holder did not attend over the prompt's blocks: {error.message}") from error

    def _finish(self, call: PendingAttention, like: Tensor) -> Partial:
        there, _ = call.finish_told()
        return Partial(out=there.out.to(like.device), lse=there.lse.to(like.device))


def await_placed(job: Job, traceparent: str) -> int:
    """Leading blocks of the prompt that lie at its targets, once decode has what it fetches. Blocks its
    thread; raises what decode raises."""
    first = job.targets[0]
    client = DataClient(first.data_address)
    request = data_pb2.DataRequest(
        traceparent=traceparent,
        await_history=data_pb2.AwaitHistory(handle=first.handle, epoch=first.epoch),
    )
    try:
        return client.call(request, deadline=Deadline(job.deadline_s)).placed_history.blocks
    finally:
        client.close()


def can_spread(job: Job) -> bool:
    """Whether all of the prompt has a place at its targets."""
    if job.request.truncated.shifted_head_tokens:
        return False
    covered = sum(target.blocks for target in job.targets)
    return covered >= job.total_blocks


def take_window(job: Job, allocator: BlockAllocator, chunk: range) -> None:
    """Blocks for a chunk's own tokens. Raises CapacityExhausted."""
    covered = job.covered_blocks(chunk)
    if job.blocks[covered.start] == NOT_HERE:
        job.blocks[covered.start : covered.stop] = allocator.allocate(len(covered))


def leave_window(job: Job, allocator: BlockAllocator) -> None:
    """The job has no block here any more; those that are still on their way are kept until they are there."""
    allocator.release([block for block in job.blocks if block != NOT_HERE])
    job.blocks = [NOT_HERE] * len(job.blocks)
