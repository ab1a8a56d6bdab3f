"""Prompts beyond this instance's memory: their KV lies where decode will attend over it, from the first chunk
on (Infinite-LLM, section 4.6: blocks are planned ahead from the prompt's length).

A chunk's own blocks are here while it is computed, and go out layer by layer meanwhile. What came before them
is attended over where it lies: the chunk's queries go there, partials come back. So history that is there
already, or that decode fetches, is neither computed nor seen here.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque

import torch
from torch import Tensor

from kvcommons.backend.interface import Backend, Partial
from kvcommons.engine.chunk_rows import ChunkRows
from kvcommons.engine.core import Core
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.engine.prompt import NOT_HERE, Prompt
from kvcommons.errors import CapacityExhausted, KVCommonsError, Unavailable
from kvcommons.holder.attend_call import PendingPartial, begin_attend
from kvcommons.holder.exchange import Recipient, by_heads
from kvcommons.holder.plan import PlanRow
from kvcommons.holder.plan_connection import PlanPool
from kvcommons.holder.segments import SegmentRef
from kvcommons.model.slices import State
from kvcommons.pb import data_pb2
from kvcommons.prefill.push import Delivery
from kvcommons.prefill.targets import Place, Target, TargetTable
from kvcommons.rblock.heads import HeadPart, transfers
from kvcommons.rblock.layout import Layout
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.transport.deadline import Deadline

log = logging.getLogger(__name__)

ROOM_POLL_S = 0.005  # while blocks are on their way out


class Holders:
    """Connections to the holders of spread prompts. Used by the engine's thread."""

    def __init__(
        self,
        layout: Layout,
        backend: Backend,
        *,
        attend_deadline_s: float,
        heads: HeadPart | None = None,
        dialer: Dialer = UNSECURED,
    ) -> None:
        """`layout`: of the heads that are here. `attend_deadline_s`: what one layer of a chunk waits for
        them. `heads`: which of the model's are here, a rank's; None: all."""
        self._layout, self._backend = layout, backend
        self._heads = heads
        self._attend_deadline_s = attend_deadline_s
        self.dialer = dialer
        self._plans: dict[str, PlanPool] = {}

    def close(self) -> None:
        for plans in self._plans.values():
            plans.close()

    def ask(
        self,
        targets: tuple[Target, ...],
        block_tokens: int,
        layer: int,
        keys: range,
        q: Tensor,
        *,
        position: int,
    ) -> list[PendingPartial]:
        """Partials of queries q [T, H, D], at positions from `position` on, over `keys`, which lie before
        that and begin at a block's border."""
        deadline = Deadline.after(self._attend_deadline_s)
        asked: list[PendingPartial] = []
        try:
            for target in targets:
                there = _keys_at(target, block_tokens, keys)
                if there:
                    row = PlanRow.of(
                        SegmentRef(handle=target.handle, epoch=target.epoch),
                        queries=len(q), position=position, length=len(there),
                        first_block=there.start // block_tokens - target.first_block,
                    )  # fmt: skip
                    recipients = self._recipients(target, row)
                    asked.append(
                        begin_attend(self._layout, self._backend, recipients, layer, q, None, deadline)
                    )
        except BaseException:
            for call in asked:
                call.cancel()
            raise
        return asked

    def most_tokens(self, targets: tuple[Target, ...], block_tokens: int, before: int) -> int:
        """Of the tokens before a position those that one of them attends over; a part of a head group has
        its share of the heads, and so takes as long as for fewer tokens."""
        shares: Counter[str] = Counter()
        for target in targets:
            places, there = self._places(target), _keys_at(target, block_tokens, range(before))
            for place in places:
                shares[place.data_address] += len(there) // len(places)
        return max(shares.values(), default=0)

    def _recipients(self, target: Target, row: PlanRow) -> list[Recipient]:
        """Of the same row at each of the target's places."""
        recipients = [
            Recipient(
                plans=self._plans_at(place.data_address),
                rows=[row.at(SegmentRef(handle=place.handle, epoch=place.epoch))],
            )
            for place in self._places(target)
        ]
        return by_heads(self._layout, recipients)

    def _places(self, target: Target) -> list[Place]:
        """Those that have keys for the queries that are here."""
        return [target.places[transfer.place] for transfer in transfers(self._heads, len(target.places))]

    def _plans_at(self, address: str) -> PlanPool:
        """An address that many prompts used keeps its connections; there are as many as holders."""
        if address not in self._plans:
            self._plans[address] = PlanPool(self.dialer.client(address, "holder"))
        return self._plans[address]


def _keys_at(target: Target, block_tokens: int, keys: range) -> range:
    """Those of these tokens of the sequence that lie there."""
    first = target.first_block * block_tokens
    return range(max(first, keys.start), min(first + target.blocks * block_tokens, keys.stop))


class SpreadRows(ChunkRows):
    """A chunk of a spread prompt: the blocks of its own positions are here; what is before them is
    elsewhere."""

    def __init__(
        self,
        core: Core,
        prompt: Prompt,
        positions: range,
        delivery: Delivery,
        targets: tuple[Target, ...],
        holders: Holders,
    ) -> None:
        """`delivery`: of the chunks before it."""
        request, size = prompt.request, core.block_tokens
        first = positions.start // size
        table = torch.tensor(prompt.blocks[first : -(-positions.stop // size)])
        super().__init__(core, request.tokens, positions, table, request.truncated, first_block=first)
        self._device, self._attention = core.backend.device, core.backend.attention
        self._before = positions.start
        self._block_tokens = core.block_tokens
        self._delivery: Delivery | None = delivery
        self._targets = targets
        self._holders = holders

    def write(self, layer: int, state: State) -> None:
        """Before the first layer's go out, what was computed before has to be where it is attended over."""
        if self._delivery is not None:
            self._delivery.await_arrival()
            self._delivery = None
        super().write(layer, state)

    def paged(self) -> None:
        """The holders are asked at each layer."""

    def attend(self, layer: int, state: State) -> Tensor:
        """The holders compute while this instance does."""
        asked = deque[PendingPartial]()
        try:
            asked += self._ask(layer, range(self._head, self._before), state.q)
            if self._head_rotation is not None:
                query = self._core.model.shifted_query(state, self._head_rotation)
                asked += self._ask(layer, range(self._head), query)
            partials = [self.partial(layer, range(self._before, self._length), state.q)]
            while asked:
                partials.append(self._finish(asked.popleft()))
            return self._attention.merge(partials).out
        except KVCommonsError as error:
            raise Unavailable(f"a holder did not attend over the prompt's blocks: {error.message}") from error
        finally:
            for call in asked:  # behind one that failed
                call.cancel()

    def _ask(self, layer: int, keys: range, query: Tensor) -> list[PendingPartial]:
        return self._holders.ask(self._targets, self._block_tokens, layer, keys, query, position=self._before)

    def _finish(self, call: PendingPartial) -> Partial:
        there, _ = call.finish()
        return Partial(out=self._device.upload(there.out), lse=self._device.upload(there.lse))


class SpreadPrompt:
    """One spread prompt's `PromptMemory`: its next chunk has room here while the last one's blocks are on
    their way out."""

    keeps = False

    def __init__(
        self,
        core: Core,
        keeper: BlockKeeper,
        holders: Holders,
        delivery: Delivery,
        targets: TargetTable,
        chunk_tokens: int,
        *,
        windows: int = 2,
    ) -> None:
        """`windows`: how many chunks' blocks are here at once, those that are on their way out included."""
        self._core = core
        self._keeper = keeper
        self._holders = holders
        self._delivery = delivery
        self._targets = targets
        chunk_max = max(core.allocator.total // windows, 1) * core.block_tokens
        self._chunk_tokens = min(chunk_tokens, chunk_max)
        self._here = range(0)  # blocks of the sequence

    def check(self, prompt: Prompt) -> None:
        """Its targets have room for it, or others join them (`can_spread`)."""

    def take(self, prompt: Prompt) -> bool:
        prompt.blocks = [NOT_HERE] * prompt.total_blocks
        self._take_window(prompt, self.chunk(prompt, self._chunk_tokens))
        return True

    def chunk(self, prompt: Prompt, tokens: int) -> range:
        """Whole blocks: what is before them lies elsewhere."""
        size = prompt.block_tokens
        return prompt.chunk(max(min(tokens, self._chunk_tokens) // size * size, size))

    def work(self, chunk: range) -> IterationWork:
        most = self._holders.most_tokens(self._targets.now, self._core.block_tokens, chunk.start)
        return IterationWork.of_chunk(chunk, elsewhere=chunk.start, most=most)

    def open(self, prompt: Prompt, chunk: range) -> bool:
        """Waits until what was computed is where it is attended over, which is no part of an iteration. False
        where room for the chunk is still on its way out."""
        self._delivery.await_arrival()
        try:
            self._take_window(prompt, chunk)
        except CapacityExhausted:
            if not self._keeper.make_room():
                time.sleep(ROOM_POLL_S)
            return False
        return True

    def rows(self, prompt: Prompt, chunk: range) -> ChunkRows:
        return SpreadRows(self._core, prompt, chunk, self._delivery, self._targets.now, self._holders)

    def close(self, prompt: Prompt) -> None:
        """No block is held here any more; those that are still on their way are kept until they are there."""
        here, self._here = slice(self._here.start, self._here.stop), range(0)
        self._core.allocator.release(prompt.blocks[here])
        prompt.blocks[here] = [NOT_HERE] * len(prompt.blocks[here])

    def _take_window(self, prompt: Prompt, chunk: range) -> None:
        """Blocks for a chunk's own tokens. Raises CapacityExhausted."""
        size = prompt.block_tokens
        first, stop = chunk.start // size, -(-chunk.stop // size)
        if prompt.blocks[first] == NOT_HERE:
            prompt.blocks[first:stop] = self._core.allocator.allocate(stop - first)
            self._here = range(first, stop)


def await_placed(dialer: Dialer, first: Target, deadline: Deadline, traceparent: str) -> int:
    """Leading blocks of the prompt that lie at its targets, of which this is the first, once decode has what
    it fetches. Blocks its thread; raises what decode raises."""
    client = dialer.client(first.data_address, "decode")
    request = data_pb2.DataRequest(
        traceparent=traceparent,
        await_history=data_pb2.AwaitHistory(handle=first.handle, epoch=first.epoch),
    )
    try:
        return client.call(request, deadline=deadline).placed_history.blocks
    finally:
        client.close()


def can_spread(targets: TargetTable, heads: HeadPart | None = None) -> bool:
    """Whether there is a place at its targets, or at those that join them, which attend over it: pipeline
    stages do not, and for a rank, which has these `heads`, only those that have no others."""
    used = [target for target in targets.now if target.blocks]
    staged = any(target.stages for target in used)
    ranks = 1 if heads is None else heads.parts
    divided = all(len(target.places) % ranks == 0 for target in used)
    return bool(used) and not staged and divided
