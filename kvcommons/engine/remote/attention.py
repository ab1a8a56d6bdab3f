"""Partials over segments on other holders: asked for before the local ones are computed, merged after.

What a holder cannot answer for is lost for this iteration and the sequence with it; the others of the batch
go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcommons.attention.memory import BlockMemory
from kvcommons.attention.partial import Partial
from kvcommons.engine.batch import Batch, Group, HolderShare, RemoteSegment
from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.remote.messages import Message, Messages, NewRows
from kvcommons.engine.remote.mini_batches import Exchange, MiniBatches
from kvcommons.engine.remote.timing import Answer, RemoteTiming
from kvcommons.errors import DataLoss, DeadlineExceeded, KVCommonsError, Unavailable
from kvcommons.holder import asking
from kvcommons.holder.budget import AttentionBudget
from kvcommons.holder.creditor import PendingAttention
from kvcommons.placement.auto import Rates
from kvcommons.rblock.layout import Layout
from kvcommons.transport.deadline import Deadline

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Asked:
    message: Message
    call: PendingAttention
    began_s: float
    alone: bool  # nothing else is asked of this holder in this layer
    waited_s: float = 0.0  # for it, so far


@dataclass(slots=True)
class RemoteStep:
    """One iteration's dealings with other holders. `lost` has, by row, why a row's attention is
    incomplete."""

    batch: Batch
    timing: IterationTiming
    messages: list[Message]
    largest: Exchange  # of a holder's, all of its messages together
    deadline_s: float  # of a layer
    deadline: Deadline
    here: Partial | None = None  # where this instance's own partials go, if it matters
    # The messages without the interpreter; None: in Python, from here to the iteration's end. What has `left`
    # has connections to give back.
    asks: asking.Asks | None = None
    left: asking.Asks | None = None
    lost: dict[int, KVCommonsError] = field(default_factory=dict)


class RemoteAttention:
    """The engine's dealings with other holders."""

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        rates: Rates,
        budget: AttentionBudget,
        mini_batches: int = 0,
    ) -> None:
        """`rates` is told what was measured, `budget` when this process has nothing to do but wait. A holder
        is sent its share of a batch in so many `mini_batches`; 0: in as many as pays by what was measured."""
        self._budget = budget
        self._device = device
        self._layout = layout
        self._mini_batches = MiniBatches(mini_batches)
        self._told = RemoteTiming(rates, self._mini_batches)

    def begin(
        self,
        batch: Batch,
        deadline_s: float,
        timing: IterationTiming,
        own: tuple[BlockMemory, Tensor] | None = None,
    ) -> RemoteStep:
        """An iteration of the batch, whose layers may wait so long each. `own`: where K and V of rows go
        whose newest tokens lie here (BlockMemory.rows_of)."""
        messages = self._messages(batch)
        largest = messages.largest()
        if messages.all:
            number = self._mini_batches.decide(largest, busy=len(batch.part_rows) > 0)
            if number != batch.mini_batches:
                batch.divide(number)
                messages = self._messages(batch)
        step = RemoteStep(batch, timing, messages.all, largest, deadline_s, Deadline.after(deadline_s))
        if messages.all and asking.serves(self._layout, self._device):
            places = None if own is None else (*own, batch.append_rows)
            step.asks, step.here = messages.asks_for(batch, deadline_s, places), messages.here
        return step

    def ask(self, step: RemoteStep, new: NewRows) -> list[_Asked]:
        """Sends each holder its part. Without the interpreter (`step.asks`) it also writes what belongs here,
        and nothing is left to cancel."""
        asks = step.asks
        if asks is not None and (asks.opened or self._open(step, asks)):
            if asks.ask(new.layer, new.q.plain, new.k, new.v, new.q.shifted):
                return []
            return self._unsent(step, asks)
        asked: list[_Asked] = []
        began_s = time.monotonic()
        step.deadline = Deadline(began_s + step.deadline_s)
        if step.lost:
            step.messages = self._without_lost(step)
        for message in step.messages:
            try:
                asked.append(self._send(step, message, new, alone=step.batch.mini_batches == 1))
            except KVCommonsError as error:
                self._lose(step, message.share.segments, error)
            except BaseException:
                self.cancel(asked)
                raise
        step.timing.network_s += time.monotonic() - began_s
        return asked

    def cancel(self, asked: Iterable[_Asked]) -> None:
        """Instead of `collect`, or where that raised."""
        for item in asked:
            item.call.cancel()

    def collect(
        self, step: RemoteStep, asked: list[_Asked], new: NewRows, here: Partial | None = None
    ) -> Partial:
        """The layer's attention [B, H, D]: the holders' partials, merged with this instance's own, of
        `batch.part_groups`."""
        began_s = time.monotonic()
        if step.asks is not None:
            with self._budget.waiting():
                received = step.asks.receive()
            if received:
                return step.asks.whole
            asked = self._unreceived(step, step.asks)
        contributions: list[tuple[list[Group], Partial]] = []
        answers: list[Answer] = []
        with self._budget.waiting():
            for item in asked:
                share = item.message.share
                try:
                    contributions.append((share.groups, self._receive(item, answers)))
                except (Unavailable, DeadlineExceeded) as error:
                    self._lose(step, share.segments, error)
                except KVCommonsError as error:
                    if len(share.segments) == 1:
                        self._lose(step, share.segments, error)
                    else:
                        contributions += self._one_by_one(step, share, new, answers)
        now_s = time.monotonic()
        self._tell(step, answers, now_s - began_s, now_s)
        self._release(step)
        own = [] if here is None else [(step.batch.part_groups, here)]
        return step.batch.gather(own + contributions, new.q.plain)

    def settle(self, step: RemoteStep) -> None:
        """Tells what was measured so far. What layers without the interpreter took waits for this."""
        if step.asks is None:
            return
        alone = step.batch.mini_batches == 1
        for turn in step.asks.take_turns():
            step.timing.network_s += turn.asked_s - turn.asks_s
            step.timing.native_layers += 1
            answers = [
                Answer(
                    message,
                    began_s,
                    came_s - waits_s,
                    came_s,
                    queued_us / 1e6,
                    computed_us / 1e6,
                    True,
                    alone,
                )
                for message, (began_s, waits_s, came_s, queued_us, computed_us) in zip(
                    step.messages, turn.told, strict=True
                )
            ]
            self._tell(step, answers, turn.came_s - turn.waits_s, turn.came_s)

    def end(self, step: RemoteStep) -> None:
        """Of the iteration, whether it went well or not: no connection is held any more."""
        self.settle(step)
        step.left, step.asks = step.left or step.asks, None
        self._release(step)

    def _messages(self, batch: Batch) -> Messages:
        if batch.messages is None or not batch.messages.fit(batch):
            batch.messages = Messages(batch, self._layout)
        batch.messages.advance(batch)
        return batch.messages

    def _open(self, step: RemoteStep, asks: asking.Asks) -> bool:
        """Whether all messages can be sent without the interpreter, from the iteration's first layer on."""
        failed = asks.open(Deadline.after(step.deadline_s))
        if failed is None and step.batch.messages is not None:
            step.batch.messages.able = False
        for number, error in (failed or {}).items():
            self._lose(step, step.messages[number].share.segments, error)
        if failed == {}:
            return True
        step.left, step.asks = asks, None
        self._release(step)
        return False

    def _unsent(self, step: RemoteStep, asks: asking.Asks) -> list[_Asked]:
        """What was sent, where something was not; the rest of the iteration is Python's."""
        step.timing.network_s += asks.asking_s
        asked = []
        for message, call in self._leave(step, asks):
            try:
                call.check_sent()
                asked.append(_Asked(message, call, call.told.began_s, step.batch.mini_batches == 1))
            except KVCommonsError as error:
                self._lose(step, message.share.segments, error)
        return asked

    def _unreceived(self, step: RemoteStep, asks: asking.Asks) -> list[_Asked]:
        """All messages, where one was not answered, or with an error; those before it have their answers."""
        asked = []
        for message, call in self._leave(step, asks):
            told, alone = call.told, step.batch.mini_batches == 1
            asked.append(_Asked(message, call, told.began_s, alone, max(told.came_s - told.waits_s, 0.0)))
        return asked

    def _leave(self, step: RemoteStep, asks: asking.Asks) -> list[tuple[Message, asking.Call]]:
        """The layer's messages; what is not answered yet is Python's, and so are the layers to come."""
        step.deadline = asks.deadline
        calls = [(message, asks.call(number)) for number, message in enumerate(step.messages)]
        self.settle(step)
        step.left, step.asks = asks, None
        return calls

    def _release(self, step: RemoteStep) -> None:
        if step.left is not None:
            step.left.end()
            step.left = None

    def _tell(self, step: RemoteStep, answers: list[Answer], blocked_s: float, came_s: float) -> None:
        whole = None if step.lost else (step.largest, step.batch.mini_batches)
        busy = len(step.batch.part_rows) > 0
        self._told.layer(step.timing, answers, blocked_s, came_s, whole=whole, busy=busy)

    def _one_by_one(
        self, step: RemoteStep, share: HolderShare, new: NewRows, answers: list[Answer]
    ) -> list[tuple[list[Group], Partial]]:
        """The holder is well but refuses something: only the sequences whose segment is at fault are lost.

        Asking again is safe: an appended token is written to the same place.
        """
        partials = []
        for segment in share.segments:
            single = step.batch.share(share.holder, [segment])
            try:
                message = Message(step.batch, single, self._layout)
                again = self._send(step, message, new, alone=False)
                partials.append((single.groups, self._receive(again, answers)))
            except KVCommonsError as error:
                self._lose(step, [segment], error)
        return partials

    def _without_lost(self, step: RemoteStep) -> list[Message]:
        """What is left to ask for, where rows were lost in a layer before."""
        left = []
        for message in step.messages:
            share = message.share
            segments = [segment for segment in share.segments if segment.row not in step.lost]
            if len(segments) == len(share.segments):
                left.append(message)
            elif segments:
                left.append(Message(step.batch, step.batch.share(share.holder, segments), self._layout))
        return left

    def _send(self, step: RemoteStep, message: Message, new: NewRows, *, alone: bool) -> _Asked:
        began_s = time.monotonic()
        queries, appended = message.fill(new)
        call = message.share.holder.begin_attend(new.layer, message.request, queries, appended, step.deadline)
        return _Asked(message, call, began_s, alone)

    def _receive(self, asked: _Asked, answers: list[Answer]) -> Partial:
        waits_s = time.monotonic()
        try:
            partial, reply = asked.call.finish_told()
        except DeadlineExceeded:
            now_s = time.monotonic()
            waited_s = asked.waited_s + now_s - waits_s
            answers.append(Answer(asked.message, asked.began_s, waited_s, now_s, answered=False))
            raise
        now_s = time.monotonic()
        waited_s = asked.waited_s + now_s - waits_s
        answers.append(
            Answer(
                message=asked.message,
                began_s=asked.began_s,
                waited_s=waited_s,
                came_s=now_s,
                queued_s=reply.queued_us / 1e6,
                computed_s=reply.computed_us / 1e6,
                alone=asked.alone,
            )
        )
        if self._device.type != "cpu":
            partial = Partial(out=partial.out.to(self._device), lse=partial.lse.to(self._device))
        return partial

    def _lose(self, step: RemoteStep, segments: list[RemoteSegment], error: KVCommonsError) -> None:
        for segment in segments:
            step.lost[segment.row] = DataLoss(
                f"the sequence's KV on the holder at {segment.run.holder.data_address} is lost "
                f"({error.message}): compute it again from its tokens"
            )
        log.warning(
            "a holder failed its sequences",
            extra={
                "holder": segments[0].run.holder.data_address,
                "segments": len(segments),
                "reason": error.message,
            },
        )
