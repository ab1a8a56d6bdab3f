"""What every transport offers: connections that carry frames, and listeners that accept them.

A frame is a head (a serialised DataRequest or DataReply, or a layer's fixed head) followed by a payload of
raw bytes. One connection
carries one exchange at a time, and belongs to one thread at a time; only `abort` may be called by another.
Errors are Unavailable (peer gone or unreachable), DeadlineExceeded, TooLarge (over a limit) and DataLoss
(bytes that are no frame). After any of them the connection is of no more use and must be closed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvcommons.errors import Unavailable
from kvcommons.transport.deadline import Deadline

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a peer may send. Both ends check before they send and before they receive."""

    head_bytes: int = 4 << 20
    payload_bytes: int = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One finished exchange, for the Observer at either end."""

    op: str  # the request's field in DataRequest; "attend_layer" for a layer
    sent_bytes: int  # payload
    received_bytes: int  # payload
    seconds: float
    error: str  # code of kvcommons.errors; empty when all went well


Observer = Callable[[Observation], None]


class SendBroken(Unavailable):
    """The peer went away while a frame was being sent."""

    def __init__(self, message: str, *, sent_bytes: int) -> None:
        super().__init__(message)
        self.sent_bytes = sent_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """A connection for the native path: its socket, which stays the connection's, and how long a wait asks
    before it sleeps."""

    descriptor: int
    ask_s: float


class Connection(Protocol):
    @property
    def peer(self) -> str:
        """The other end's address, for messages."""
        ...

    def send(
        self,
        head: bytes,
        payload: Sequence[Buffer],
        deadline: Deadline,
        *,
        last: bool = False,
        layer: bool = False,
    ) -> None:
        """Sends one frame straight from the payload's buffers, in order. `last` announces that this end takes
        no more frames, `layer` that the head is a layer's. Raises SendBroken when the peer is gone."""
        ...

    def receive_head(self, deadline: Deadline) -> tuple[bytes, int]:
        """The next frame's head, and the bytes of the payload that follows."""
        ...

    def receive_payload(self, into: Sequence[Buffer], deadline: Deadline) -> None:
        """Fills writable buffers, in order, from the current frame's payload. They may ask for a part of it
        only."""
        ...

    def drain(self, deadline: Deadline) -> None:
        """Throws away what is left of the current frame's payload."""
        ...

    @property
    def unread_bytes(self) -> int:
        """Of the current frame's payload."""
        ...

    @property
    def peer_leaves(self) -> bool:
        """Whether the last frame received said that its sender takes no more."""
        ...

    @property
    def layer_head(self) -> bool:
        """Whether the head of the last frame received is a layer's."""
        ...

    def linger(self, deadline: Deadline) -> None:
        """Says that nothing more will be sent, and throws away what comes until the peer has closed its
        end."""
        ...

    def wait_readable(self, deadline: Deadline) -> bool:
        """Whether bytes, or the peer's end, can be read before the deadline. Between exchanges it tells a
        stale connection from a live one: nothing is ever sent there unasked."""
        ...

    @property
    def proven(self) -> bool:
        """Whether the peer has shown all that it is asked for. May be asked by any thread."""
        ...

    def ask_for(self, ask_s: float) -> None:
        """How long a wait asks before it sleeps, where the one before was about as short."""
        ...

    def receive_exactly(self) -> None:
        """From now on nothing is received ahead: what follows a frame stays where the native path finds
        it."""
        ...

    def bare(self) -> Bare | None:
        """Where frames are what its socket carries, and nothing of one has been taken from there. Whoever has
        it leaves whole frames behind, hands what it took to `unreceive`, or closes the connection."""
        ...

    def unreceive(self, received: Buffer) -> None:
        """What was taken from its socket since a frame's beginning, and is to be received from here."""
        ...

    def abort(self) -> None:
        """Makes all pending and later operations fail at once. May be called by any thread."""
        ...

    def close(self) -> None: ...


class Listener(Protocol):
    @property
    def address(self) -> str:
        """Where it can be reached, with the port that the system chose."""
        ...

    def accept(self) -> Connection | None:
        """The next connection; None once the listener was stopped."""
        ...

    def stop(self) -> None:
        """Makes accept return None. May be called by any thread."""
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    """`rest` is an address without its scheme."""

    def connect(self, rest: str, limits: Limits, deadline: Deadline) -> Connection: ...

    def listen(self, rest: str, limits: Limits) -> Listener: ...
