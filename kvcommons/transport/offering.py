"""A socket on which the two sides agree, before the first frame, on what carries frames: the accepting side
offers something faster than the socket, or asks who is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvcommons.errors import KVCommonsError, Unavailable
from kvcommons.transport.base import Bare
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.framed import Stream
from kvcommons.transport.sockets import ASK_S, SocketStream


class Terms(Protocol):
    """What the accepting side offers on one connection."""

    def offer(self) -> bool:
        """Makes the offer; False: there is nothing, and this was said instead. Raises Unavailable."""
        ...

    def decline(self) -> None:
        """Says instead of an offer that there is none. Raises Unavailable."""
        ...

    def answered(self, deadline: Deadline) -> Stream | None:
        """Reads the answer, which begins to be there. None: the socket itself. Raises Unavailable for the
        peer's end, DataLoss for what is no answer."""
        ...

    def close(self) -> None:
        """Gives back what was offered and not taken."""
        ...


class OfferingStream:
    """The accepting side's Stream. It makes its offer when it is first used, on the thread that serves the
    connection, and carries bytes once it was answered."""

    def __init__(self, plain: SocketStream, terms: Terms, *, within_s: float | None = None) -> None:
        """`within_s`: for peers that have to show who they are, and for so long are not known."""
        self._asks = within_s is not None
        self._until = Deadline.after(within_s) if within_s is not None else None
        self._plain = plain
        self._terms = terms
        self._offered = False
        self._chosen: Stream | None = None
        self._failure: KVCommonsError | None = None
        self._ask_s = ASK_S

    def send_some(self, views: Sequence[memoryview], deadline: Deadline) -> int:
        if self._chosen is None:
            # An answer before any question turns the peer away.
            self._chosen = self._plain
            if not self._offered:
                self._terms.decline()
        return self._chosen.send_some(views, deadline)

    def receive_some(self, views: Sequence[memoryview], deadline: Deadline) -> int:
        if self._chosen is None and not self.wait_readable(deadline):
            raise self._plain.waited("for")
        if self._failure:
            raise self._failure
        return (self._chosen or self._plain).receive_some(views, deadline)

    def wait_readable(self, deadline: Deadline) -> bool:
        if self._chosen is None:
            try:
                if not self._offered:
                    self._offered = self._terms.offer()
                if self._offered:
                    if not self._plain.wait_readable(self._bounded(deadline)):
                        if self._until is not None and self._until.passed():
                            raise Unavailable(f"{self._plain.peer} has not said who it is")
                        return False
                    self._chosen = self._terms.answered(deadline)
            except KVCommonsError as error:
                self._failure = error  # for whoever receives
            self._chosen = self._chosen or self._plain
            self._chosen.ask_for(self._ask_s)
        return bool(self._failure) or self._chosen.wait_readable(deadline)

    @property
    def proven(self) -> bool:
        return not self._asks or (self._chosen is not None and self._failure is None)

    def _bounded(self, deadline: Deadline) -> Deadline:
        return deadline if self._until is None else deadline.within(self._until.left())

    def ask_for(self, ask_s: float) -> None:
        self._ask_s = ask_s
        (self._chosen or self._plain).ask_for(ask_s)

    def finish(self) -> None:
        (self._chosen or self._plain).finish()

    def bare(self) -> Bare | None:
        return self._chosen.bare() if self._chosen else None  # before, greetings

    def abort(self) -> None:
        (self._chosen or self._plain).abort()

    def close(self) -> None:
        (self._chosen or self._plain).close()
        self._terms.close()
