"""The shell around the capacity queues: one for each model."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from kvcommons.errors import CapacityExhausted, KVCommonsError, Overloaded
from kvcommons.pb.common_pb2 import ModelInfo
from services.router.capacity.queue import CapacityQueue, Ticket
from services.router.fleet.fleet import Fleet, blocks_of

# How long the first in a queue waits before it probes. It is drawn at random, so that routers do not probe
# together.
_PAUSE_S_MIN = 0.5
_PAUSE_S_MAX = 1.0
_RETRY_AFTER_MS = 1000


def _pause_s() -> float:
    return random.uniform(_PAUSE_S_MIN, _PAUSE_S_MAX)


class CapacityQueues:
    """Belongs to the event loop."""

    def __init__(
        self,
        fleet: Fleet,
        clock: Callable[[], float] = time.monotonic,
        pause_s: Callable[[], float] = _pause_s,
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self._pause_s = pause_s
        self._queues: dict[bytes, tuple[ModelInfo, CapacityQueue]] = {}
        self._permits: dict[Ticket, asyncio.Future[None]] = {}
        self._about_to_ask: set[Ticket] = set()  # have a permit, and have not used it yet
        self._timers: dict[bytes, asyncio.TimerHandle] = {}

    @property
    def waiting(self) -> int:
        """How many choices wait."""
        return sum(len(queue) for _, queue in self._queues.values())

    @asynccontextmanager
    async def permit(
        self,
        ticket: Ticket,
        model: ModelInfo,
        tokens: int,
        waits: Callable[[KVCommonsError], None],
        prefix: Sequence[bytes] = (),
    ) -> AsyncIterator[float]:
        """A permit to ask decode for room for `tokens` and one more token, less what running sequences have
        of the `prefix`. Yields the seconds that the ticket's choice waited for it. The caller reserves the
        blocks at once (`Fleet.reserve`), and calls `reserved` when decode has granted them. Leaving with
        Overloaded before that is a refusal: the ticket then stays in the queue until its next permit, or
        `leave`.

        Where the choice has to wait, `waits` is called with the error that the client gets if the request's
        time runs out meanwhile.
        """
        since_s, queue = self._clock(), self._queue(model)
        queue.join(ticket, blocks_of(model, tokens) - self._fleet.shared_blocks(model, prefix))
        future = self._permits[ticket] = asyncio.get_running_loop().create_future()
        refused = False
        try:
            self._advance(model)
            if not future.done():
                waits(_no_capacity(ticket.blocks, len(queue) - 1))
            await future
            self._about_to_ask.discard(ticket)
            yield self._clock() - since_s
        except Overloaded:
            refused = not ticket.has_reservation
            raise
        finally:
            del self._permits[ticket]
            self._about_to_ask.discard(ticket)
            if refused:
                queue.refused(ticket, self._clock())
            else:
                queue.leave(ticket)
            self._advance(model)  # what the choice held is free, or the next one may ask

    def reserved(self, ticket: Ticket, model: ModelInfo) -> None:
        self._queue(model).reserved(ticket)
        self._advance(model)

    def leave(self, ticket: Ticket, model: ModelInfo) -> None:
        """The choice does not come back after its refusal. Without effect where it is not in the queue."""
        self._queue(model).leave(ticket)
        self._advance(model)

    def update(self) -> None:
        """Heartbeats came: blocks may have come free."""
        self._fleet.update()
        for model, _ in list(self._queues.values()):
            self._advance(model)

    def _queue(self, model: ModelInfo) -> CapacityQueue:
        known = self._queues.get(model.fingerprint)
        if known is None:
            known = self._queues[model.fingerprint] = (model, CapacityQueue(pause_s=self._pause_s))
        return known[1]

    def _advance(self, model: ModelInfo) -> None:
        queue = self._queue(model)
        while len(queue):
            free_blocks = self._fleet.largest_free(model)
            if free_blocks is not None:
                free_blocks -= sum(one.blocks for one in self._about_to_ask)
            ticket = queue.advance(free_blocks, self._clock())
            if ticket is None:
                break
            self._about_to_ask.add(ticket)
            future = self._permits[ticket]
            if not future.done():
                future.set_result(None)
        timer = self._timers.pop(model.fingerprint, None)
        if timer is not None:
            timer.cancel()
        if queue.due_s is not None:
            delay_s = max(queue.due_s - self._clock(), 0.001)
            loop = asyncio.get_running_loop()
            self._timers[model.fingerprint] = loop.call_later(delay_s, self._advance, model)


def _no_capacity(blocks: int, others: int) -> KVCommonsError:
    return CapacityExhausted(
        f"decode has no room just now for a sequence of {blocks} blocks, and {others} others wait for it: "
        "retry later, raise capacity_tokens, or add a decode or attention_pool instance",
        retry_after_ms=_RETRY_AFTER_MS,
    )
