"""Choices that wait for room at decode, of one model: who may ask for it next. Pure: the clock is an
argument.

A choice asks decode for room when there likely is some (see `rooms`); where decode refuses, it waits here, in
the order in which requests came. Nobody asks on its own: when room comes, the first in the line asks, and
the next one if there is room for both, or the first has its answer. So a refusal costs one question, however
many wait.

- Who comes when nobody waits asks at once, whatever is known of room: that may be wrong.
- A smaller one passes those for which there is no room yet, if together with all that passed one of them
  before it is not larger than that one. So what comes free for a large sequence is at most as much again as
  it needs itself: it waits for it about twice as long at most, and room is used meanwhile.
- Other routers' streams end, too, and what is known of room may be wrong for long: the first in the line asks
  once in a while though nobody told of room. Where that succeeds, the next one asks at once.
- One that was refused asks again after a pause that doubles, whatever is known of room: that was wrong.
- A question without an answer holds the line up for a bounded time, and so does one that was refused and is
  not back.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

TRY_S = 2.0  # after so long the next one asks, whether there is an answer or not
BACK_S = 0.25  # after so long nobody waits for one that was refused to come back
# After a refusal; twice as long after each further one.
_AGAIN_S, _AGAIN_S_MAX = 0.05, 0.8


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """A choice in the line. `order`: number of its request as they came, and of the choice in it."""

    order: tuple[int, int]
    blocks: int = 0  # of the sequence
    passed_blocks: int = 0  # of those that came later, and got their place earlier or ask for it
    passes: list[Ticket] = field(default_factory=list)
    probes: bool = False  # it asks though there seems to be no room
    ready: bool = False  # it would ask at once; else it is back from a refusal in a moment
    refusals: int = 0  # one after another
    back_s: float = 0.0  # until then it is waited for, where it is not ready
    again_s: float = 0.0  # not before
    has_place: bool = False


class Line:
    """`join`, `placed`, `refused` and `leave` tell what happened; call `advance` after each, and when room
    may have come."""

    def __init__(self, *, pause_s: Callable[[], float]) -> None:
        """`pause_s` draws how long the first in the line waits until it asks without word of room."""
        self._pause_s = pause_s
        self._line: list[Ticket] = []  # in order
        self._trying: dict[Ticket, float] = {}  # since when
        self._fresh: Ticket | None = None  # joined since the last `advance`
        self._head: Ticket | None = None  # of the line, for which the pause runs
        self._probe_s = 0.0  # when the pause ends
        self._lucky = False  # one that asked though there seemed to be no room got its place
        self._now_s = 0.0  # at the last `advance`

    def __len__(self) -> int:
        """Choices that wait, those that are asking not among them."""
        return len(self._line)

    @property
    def due_s(self) -> float | None:
        """When to call `advance` if nothing happens until then."""
        dues_s = [self._probe_s, *(since_s + TRY_S for since_s in self._trying.values())]
        dues_s += [one.again_s if one.ready else one.back_s for one in self._line]
        return min((at_s for at_s in dues_s if self._line and at_s > self._now_s), default=None)

    def join(self, ticket: Ticket, blocks: int) -> None:
        """A choice wants room for a sequence of `blocks`; one that was refused is back."""
        ticket.blocks, ticket.ready, ticket.has_place = blocks, True, False
        if ticket not in self._line:
            insort(self._line, ticket, key=lambda one: one.order)
            self._fresh = ticket

    def advance(self, room: int | None, now_s: float) -> Ticket | None:
        """Who asks next; call it again until there is nobody. `room`: blocks of the largest sequence that has
        room as far as is known, beside those that are asking; None: there is nobody to ask, and all may hear
        that at once."""
        fresh, self._fresh = self._fresh, None
        self._now_s = now_s
        head = self._line[0] if self._line else None
        if head is not self._head:
            self._head, self._probe_s = head, now_s + (0.0 if self._lucky else self._pause_s())
            self._lucky = False
        found = self._next(room, fresh, now_s)
        if found is not None:
            found.passes = self._before(found)
            for one in found.passes:
                one.passed_blocks += found.blocks
            self._line.remove(found)
            self._trying[found] = now_s
        return found

    def placed(self, ticket: Ticket) -> None:
        """It has got room."""
        ticket.has_place, ticket.passed_blocks, ticket.refusals = True, 0, 0
        ticket.passes.clear()
        if self._out(ticket) and ticket.probes:
            self._lucky, self._head = True, None

    def refused(self, ticket: Ticket, now_s: float) -> None:
        """It keeps its place in the line, and comes back (`join`) or leaves."""
        if self._out(ticket):
            ticket.ready, ticket.back_s = False, now_s + BACK_S
            ticket.again_s = now_s + min(_AGAIN_S * 2**ticket.refusals, _AGAIN_S_MAX)
            ticket.refusals += 1
            insort(self._line, ticket, key=lambda one: one.order)
            self._head, self._probe_s = self._line[0], now_s + self._pause_s()

    def leave(self, ticket: Ticket) -> None:
        """It wants nothing any more, wherever it was."""
        if not self._out(ticket) and ticket in self._line:
            self._line.remove(ticket)

    def _next(self, room: int | None, fresh: Ticket | None, now_s: float) -> Ticket | None:
        busy = any(now_s < since_s + TRY_S for since_s in self._trying.values())
        first = next((one for one in self._line if one.ready or now_s < one.back_s), None)
        for ticket in self._line:
            if not ticket.ready:
                continue
            if room is None:
                ticket.probes = False
                return ticket
            if now_s < ticket.again_s:
                continue
            fits = ticket.blocks <= room
            alone = ticket is fresh and len(self._line) == 1
            probes = not busy and (alone or (ticket is first and now_s >= self._probe_s))
            if not fits and not probes:
                continue
            ahead = [one for one in self._before(ticket) if one.ready or now_s < one.back_s]
            if all(one.passed_blocks + ticket.blocks <= one.blocks for one in ahead):
                ticket.probes = not fits
                return ticket
        return None

    def _before(self, ticket: Ticket) -> list[Ticket]:
        """Those that came earlier and have no place; who asks though there seemed to be no room has none."""
        probing = [one for one in self._trying if one.probes and one.order < ticket.order]
        return probing + self._line[: self._line.index(ticket)]

    def _out(self, ticket: Ticket) -> bool:
        """Whether it was asking. Where it got no place it has passed nobody."""
        for one in ticket.passes:
            one.passed_blocks -= ticket.blocks
        ticket.passes.clear()
        return self._trying.pop(ticket, None) is not None
