"""The shell around the lines of choices that wait for room: one a model."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from kvcommons.errors import CapacityExhausted, KVCommonsError, Overloaded
from kvcommons.pb.common_pb2 import ModelInfo
from services.router.capacity.queue import Line, Ticket
from services.router.fleet.fleet import Fleet, blocks_of

# The first in the line asks so often though nobody told of room; drawn, for routers are not to ask together.
_PAUSE_S_MIN = 0.5
_PAUSE_S_MAX = 1.0
_RETRY_AFTER_MS = 1000


def _pause_s() -> float:
    return random.uniform(_PAUSE_S_MIN, _PAUSE_S_MAX)


class RoomLines:
    """All of it on the event loop's thread."""

    def __init__(
        self,
        fleet: Fleet,
        clock: Callable[[], float] = time.monotonic,
        pause_s: Callable[[], float] = _pause_s,
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self._pause_s = pause_s
        self._lines: dict[bytes, tuple[ModelInfo, Line]] = {}
        self._wake: dict[Ticket, asyncio.Future[None]] = {}
        self._starting: set[Ticket] = set()  # those that are about to ask
        self._timers: dict[bytes, asyncio.TimerHandle] = {}

    @property
    def waiting(self) -> int:
        """Choices."""
        return sum(len(line) for _, line in self._lines.values())

    @asynccontextmanager
    async def turn(
        self,
        ticket: Ticket,
        model: ModelInfo,
        tokens: int,
        waits: Callable[[KVCommonsError], None],
        prefix: Sequence[bytes] = (),
    ) -> AsyncIterator[float]:
        """Yields once the ticket's choice may ask decode for room for `tokens` and one more, less what
        running sequences have of its `prefix`; the seconds it waited. Have `Fleet.engaged` take the room at
        once, and call `placed` when decode has given it; leaving with Overloaded before that is a refusal,
        after which the ticket stays in the line until its next turn, or `leave`.

        `waits` is told, where it has to wait, of what the client is told if its time runs out meanwhile.
        """
        since_s, line = self._clock(), self._line(model)
        line.join(ticket, blocks_of(model, tokens) - self._fleet.shared(model, prefix))
        future = self._wake[ticket] = asyncio.get_running_loop().create_future()
        refused = False
        try:
            self._advance(model)
            if not future.done():
                waits(_no_room(ticket.blocks, len(line) - 1))
            await future
            self._starting.discard(ticket)
            yield self._clock() - since_s
        except Overloaded:
            refused = not ticket.has_place
            raise
        finally:
            del self._wake[ticket]
            self._starting.discard(ticket)
            if refused:
                line.refused(ticket, self._clock())
            else:
                line.leave(ticket)
            self._advance(model)  # what it held is free, or the next one may ask

    def placed(self, ticket: Ticket, model: ModelInfo) -> None:
        self._line(model).placed(ticket)
        self._advance(model)

    def leave(self, ticket: Ticket, model: ModelInfo) -> None:
        """It does not come back after its refusal. Nothing where it is not in the line."""
        self._line(model).leave(ticket)
        self._advance(model)

    def look(self) -> None:
        """Heartbeats came: there may be room."""
        self._fleet.look()
        for model, _ in list(self._lines.values()):
            self._advance(model)

    def _line(self, model: ModelInfo) -> Line:
        known = self._lines.get(model.fingerprint)
        if known is None:
            known = self._lines[model.fingerprint] = (model, Line(pause_s=self._pause_s))
        return known[1]

    def _advance(self, model: ModelInfo) -> None:
        line = self._line(model)
        while len(line):
            room = self._fleet.room_now(model)
            if room is not None:
                room -= sum(one.blocks for one in self._starting)
            ticket = line.advance(room, self._clock())
            if ticket is None:
                break
            self._starting.add(ticket)
            future = self._wake[ticket]
            if not future.done():
                future.set_result(None)
        timer = self._timers.pop(model.fingerprint, None)
        if timer is not None:
            timer.cancel()
        if line.due_s is not None:
            delay_s = max(line.due_s - self._clock(), 0.001)
            loop = asyncio.get_running_loop()
            self._timers[model.fingerprint] = loop.call_later(delay_s, self._advance, model)


def _no_room(blocks: int, others: int) -> KVCommonsError:
    return CapacityExhausted(
        f"decode has no room just now for a sequence of {blocks} blocks, and {others} others wait for it: "
        "retry later, raise capacity_tokens, or add a decode or attention_pool instance",
        retry_after_ms=_RETRY_AFTER_MS,
    )
