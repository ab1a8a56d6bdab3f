"""The choices of one model that wait for room at decode, and which of them may ask next. Pure: the clock is
an argument.

A choice asks decode for room when decode likely has some (see `occupancy`). Where decode refuses, the choice
waits in this queue, in the order in which the request queue let requests start, and no choice asks by itself:
when blocks come free, the first in the queue asks, and the next one follows if there is room for both, or as
soon as the first has its answer. So a refusal costs one call, however many choices wait.

- A choice that comes while the queue is empty asks at once, whatever is known of room: that may be wrong.
- A smaller choice passes those for which there is no room yet, as long as the blocks of all that passed one
  of them are no more than its own. So a large sequence waits until at most twice its blocks have come free,
  and room is used meanwhile.
- Other routers' streams end as well, and what is known of room may be wrong for long. So the first in the
  queue asks once in a while though no blocks are known to have come free (it *probes*). Where that succeeds,
  the next one probes at once.
- A choice that was refused asks again after a pause that doubles with each refusal in a row.
- A call without an answer holds the queue up for a bounded time, and so does a choice that was refused and
  has not come back."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

ANSWER_TIMEOUT_S = 2.0  # for an answer: the next choice asks then, whether it came or not
RETURN_TIMEOUT_S = 0.25  # for a choice that was refused to come back
# After a refusal; it doubles with each further one.
_BACKOFF_S, _BACKOFF_S_MAX = 0.05, 0.8


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """A choice in the queue. `order` is the number of its request, as the request queue let them start, and
    of the choice in it."""

    order: tuple[int, int]
    blocks: int = 0  # of the sequence
    passed_blocks: int = 0  # of those that came later, and have their room already or ask for it
    passes: list[Ticket] = field(default_factory=list)
    probes: bool = False  # it asks though no room is known
    ready: bool = False  # it can ask at once; else it was refused, and will join again in a moment
    refusals: int = 0  # in a row
    expected_until_s: float = 0.0  # others wait for it until then, where it is not ready
    retry_at_s: float = 0.0  # it does not ask before
    has_reservation: bool = False


class CapacityQueue:
    """The shell reports what happened by `join`, `reserved`, `refused` and `leave`, and calls `advance` after
    each of them and whenever blocks may have come free."""

    def __init__(self, *, pause_s: Callable[[], float]) -> None:
        """`pause_s` draws how long the first in the queue waits before it probes."""
        self._pause_s = pause_s
        self._waiting: list[Ticket] = []  # in order
        self._in_flight: dict[Ticket, float] = {}  # and when they asked
        self._newcomer: Ticket | None = None  # joined since the last `advance`
        self._head: Ticket | None = None  # of the queue, for which the pause runs
        self._probe_s = 0.0  # when the pause ends
        self._probe_succeeded = False  # the last probe got its room
        self._now_s = 0.0  # at the last `advance`

    def __len__(self) -> int:
        """Choices that wait, without those whose call is under way."""
        return len(self._waiting)

    @property
    def due_s(self) -> float | None:
        """When to call `advance` if nothing happens until then."""
        dues_s = [self._probe_s, *(since_s + ANSWER_TIMEOUT_S for since_s in self._in_flight.values())]
        dues_s += [one.retry_at_s if one.ready else one.expected_until_s for one in self._waiting]
        return min((at_s for at_s in dues_s if self._waiting and at_s > self._now_s), default=None)

    def join(self, ticket: Ticket, blocks: int) -> None:
        """A choice wants room for a sequence of `blocks`, for the first time or after a refusal."""
        ticket.blocks, ticket.ready, ticket.has_reservation = blocks, True, False
        if ticket not in self._waiting:
            insort(self._waiting, ticket, key=lambda one: one.order)
            self._newcomer = ticket

    def advance(self, free_blocks: int | None, now_s: float) -> Ticket | None:
        """The choice that may ask next; call it again until it returns None. `free_blocks`: blocks of the
        largest sequence that fits as far as is known, beside those whose calls are under way. None: no
        instance is there, and all choices may find that out at once."""
        newcomer, self._newcomer = self._newcomer, None
        self._now_s = now_s
        head = self._waiting[0] if self._waiting else None
        if head is not self._head:
            self._head, self._probe_s = head, now_s + (0.0 if self._probe_succeeded else self._pause_s())
            self._probe_succeeded = False
        found = self._next(free_blocks, newcomer, now_s)
        if found is not None:
            found.passes = self._before(found)
            for one in found.passes:
                one.passed_blocks += found.blocks
            self._waiting.remove(found)
            self._in_flight[found] = now_s
        return found

    def reserved(self, ticket: Ticket) -> None:
        """Decode granted the ticket's reservation."""
        ticket.has_reservation, ticket.passed_blocks, ticket.refusals = True, 0, 0
        ticket.passes.clear()
        if self._stop_asking(ticket) and ticket.probes:
            self._probe_succeeded, self._head = True, None

    def refused(self, ticket: Ticket, now_s: float) -> None:
        """Decode refused: the ticket keeps its place in the queue until the choice joins again or leaves."""
        if self._stop_asking(ticket):
            ticket.ready, ticket.expected_until_s = False, now_s + RETURN_TIMEOUT_S
            ticket.retry_at_s = now_s + min(_BACKOFF_S * 2**ticket.refusals, _BACKOFF_S_MAX)
            ticket.refusals += 1
            insort(self._waiting, ticket, key=lambda one: one.order)
            self._head, self._probe_s = self._waiting[0], now_s + self._pause_s()

    def leave(self, ticket: Ticket) -> None:
        """The choice wants no room any more, whether it waits or asks."""
        if not self._stop_asking(ticket) and ticket in self._waiting:
            self._waiting.remove(ticket)

    def _next(self, free_blocks: int | None, newcomer: Ticket | None, now_s: float) -> Ticket | None:
        busy = any(now_s < since_s + ANSWER_TIMEOUT_S for since_s in self._in_flight.values())
        first = next((one for one in self._waiting if one.ready or now_s < one.expected_until_s), None)
        for ticket in self._waiting:
            if not ticket.ready:
                continue
            if free_blocks is None:
                ticket.probes = False
                return ticket
            if now_s < ticket.retry_at_s:
                continue
            fits = ticket.blocks <= free_blocks
            alone = ticket is newcomer and len(self._waiting) == 1
            probes = not busy and (alone or (ticket is first and now_s >= self._probe_s))
            if not fits and not probes:
                continue
            ahead = [one for one in self._before(ticket) if one.ready or now_s < one.expected_until_s]
            if all(one.passed_blocks + ticket.blocks <= one.blocks for one in ahead):
                ticket.probes = not fits
                return ticket
        return None

    def _before(self, ticket: Ticket) -> list[Ticket]:
        """The tickets that came earlier and have no room yet. One that probes is among them."""
        probing = [one for one in self._in_flight if one.probes and one.order < ticket.order]
        return probing + self._waiting[: self._waiting.index(ticket)]

    def _stop_asking(self, ticket: Ticket) -> bool:
        """Ends the ticket's call, and returns whether there was one. What it passed without getting room is
        undone."""
        for one in ticket.passes:
            one.passed_blocks -= ticket.blocks
        ticket.passes.clear()
        return self._in_flight.pop(ticket, None) is not None
