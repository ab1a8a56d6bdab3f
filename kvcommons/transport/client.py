"""The asking end: kept connections to one address, one exchange at a time on each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from kvcommons.errors import DataLoss, KVCommonsError, Unavailable, from_detail
from kvcommons.pb import data_pb2 as pb
from kvcommons.security.credentials import OPEN, Credentials
from kvcommons.security.roles import Role
from kvcommons.transport.addresses import connect
from kvcommons.transport.base import Connection, Limits, Observation, Observer, SendBroken
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.sockets import ASK_S

if TYPE_CHECKING:
    from typing_extensions import Buffer

    # Buffers for a reply's payload, or what chooses them once the reply's head is there. Together they have
    # to take the payload exactly. None throws a payload away.
    Into = Sequence[Buffer] | Callable[[pb.DataReply, int], Sequence[Buffer]] | None

# A kept connection that nobody used for so long is closed; well under what a server allows (server.IDLE_S).
KEPT_S = 60.0
# Whoever does not accept a connection in this time counts as unreachable, whatever the call's deadline.
CONNECT_S = 3.0
# For an answer that a server gave before it hung up.
_LAST_WORD_S = 0.2


class DataClient:
    """Calls one address. Thread-safe: each call has a connection of its own. Connects when first needed."""

    def __init__(
        self,
        address: str,
        *,
        limits: Limits | None = None,
        kept_max: int = 8,
        observer: Observer | None = None,
        ask_s: float = ASK_S,
        rings: bool = True,
        role: Role = "holder",
        credentials: Credentials = OPEN,
    ) -> None:
        """At most `kept_max` idle connections are kept. `ask_s`: answers that come so soon find the caller
        awake. `rings`, `role` and `credentials`: see `connect`."""
        self._role: Role = role
        self._credentials = credentials
        self.address = address
        self._limits = limits or Limits()
        self._kept_max = kept_max
        self._observer = observer
        self._ask_s = ask_s
        self._rings = rings
        self._lock = threading.Lock()
        self._kept: list[tuple[Connection, float]] = []
        self._closed = False

    def call(
        self,
        request: pb.DataRequest,
        payload: Sequence[Buffer] = (),
        *,
        into: Into = None,
        deadline: Deadline,
    ) -> pb.DataReply:
        """Sends, waits, and receives the reply's payload straight into `into`. Raises what the peer raised,
        Unavailable, DeadlineExceeded, or DataLoss when the payload has another size than `into`."""
        return self.begin(request, payload, deadline=deadline).finish(into)

    def begin(
        self, request: pb.DataRequest, payload: Sequence[Buffer] = (), *, deadline: Deadline
    ) -> PendingCall:
        """Sends, and returns without waiting for the answer: `finish` or `cancel` it. `request.deadline_ms`
        is set to what is left. The buffers may be reused at once."""
        deadline.check(f"calling {self.address}")
        connection, kept = self._take(deadline)
        started = time.monotonic()
        request.deadline_ms = max(1, deadline.left_ms())
        head = request.SerializeToString()
        while True:
            try:
                connection.send(head, payload, deadline)
                break
            except SendBroken as error:
                if kept and not error.sent_bytes:
                    # It went stale in the pool, and the peer has seen nothing: the one case that is safe to
                    # repeat.
                    connection.close()
                    connection, kept = self.connect(deadline), False
                    continue
                failure = last_word(connection) or error
                connection.close()
                self._observe(request, 0, 0, started, failure)
                raise failure from error
            except BaseException:
                connection.close()
                raise
        sent_bytes = sum(memoryview(buffer).nbytes for buffer in payload)
        return PendingCall(self, connection, request, deadline, started, sent_bytes)

    def stream(
        self, request: pb.DataRequest, *, into: Into, replies: int, deadline: Deadline
    ) -> Iterator[pb.DataReply]:
        """Yields `replies` replies as they come (GetLayers). Closing the iterator early abandons the call."""
        with self.begin(request, deadline=deadline) as pending:
            for left in range(replies - 1, -1, -1):
                yield pending.next(into, last=not left)

    def connected(self) -> bool:
        """Whether a kept connection is there and alive: the peer is the process that was called before."""
        with self._lock:
            return any(fresh(connection, last_used_s) for connection, last_used_s in self._kept)

    def close(self) -> None:
        """Closes kept connections; calls under way finish, and close theirs."""
        with self._lock:
            self._closed = True
            kept, self._kept = self._kept, []
        for connection, _ in kept:
            connection.close()

    def _take(self, deadline: Deadline) -> tuple[Connection, bool]:
        """A connection, and whether it was used before."""
        while True:
            with self._lock:
                if self._closed:
                    raise Unavailable(f"the client of {self.address} was closed")
                if not self._kept:
                    break
                connection, last_used_s = self._kept.pop()
            if fresh(connection, last_used_s):
                return connection, True
            connection.close()
        return self.connect(deadline), False

    def connect(self, deadline: Deadline) -> Connection:
        """A new connection, which is the caller's. Raises Unavailable, DeadlineExceeded."""
        if self._closed:
            raise Unavailable(f"the client of {self.address} was closed")
        connection = connect(
            self.address,
            deadline.within(CONNECT_S),
            self._limits,
            rings=self._rings,
            role=self._role,
            credentials=self._credentials,
        )
        connection.ask_for(self._ask_s)
        return connection

    def _keep(self, connection: Connection) -> None:
        with self._lock:
            if not self._closed and not connection.peer_leaves and len(self._kept) < self._kept_max:
                self._kept.append((connection, time.monotonic()))
                return
        connection.close()

    def _observe(
        self,
        request: pb.DataRequest,
        sent: int,
        received: int,
        started: float,
        error: KVCommonsError | None,
    ) -> None:
        self.observe(
            Observation(
                op=request.WhichOneof("op") or "none",
                sent_bytes=sent,
                received_bytes=received,
                seconds=time.monotonic() - started,
                error=error.code if error else "",
            )
        )

    def observe(self, observation: Observation) -> None:
        """Of an exchange on a connection of `connect`."""
        if self._observer is not None:
            self._observer(observation)


class PendingCall:
    """A request that was sent. Ends by `finish`, by `cancel`, or as a context manager (which cancels what is
    not finished). One thread at a time, except for `abort`."""

    def __init__(
        self,
        client: DataClient,
        connection: Connection,
        request: pb.DataRequest,
        deadline: Deadline,
        started: float,
        sent_bytes: int,
    ) -> None:
        self._client = client
        self._connection: Connection | None = connection
        self._handover = threading.Lock()  # abort must not hit a connection that is back in the pool
        self._request = request
        self._deadline = deadline
        self._started = started
        self._sent_bytes = sent_bytes
        self._received_bytes = 0

    def finish(self, into: Into = None) -> pb.DataReply:
        """The one reply, its payload in `into`. Errors as in DataClient.call."""
        return self.next(into, last=True)

    def next(self, into: Into, *, last: bool | Callable[[pb.DataReply], bool]) -> pb.DataReply:
        """The next of several replies; the `last` gives the connection back."""
        connection = self._connection
        assert connection is not None, "this call has ended"
        try:
            reply = self._receive(connection, into)
        except KVCommonsError as error:
            self.cancel()
            self._client._observe(self._request, self._sent_bytes, self._received_bytes, self._started, error)
            raise
        except BaseException:
            self.cancel()
            raise
        failure = from_detail(reply.error) if reply.HasField("error") else None
        if failure or (last(reply) if callable(last) else last):
            with self._handover:
                self._connection = None
            self._client._keep(connection)
            self._client._observe(
                self._request, self._sent_bytes, self._received_bytes, self._started, failure
            )
        if failure:
            raise failure
        return reply

    def _receive(self, connection: Connection, into: Into) -> pb.DataReply:
        head, payload_bytes = connection.receive_head(self._deadline)
        reply = reply_of(head, self._client.address)
        if into is not None and not reply.HasField("error"):
            buffers = into(reply, payload_bytes) if callable(into) else into
            wanted = sum(memoryview(buffer).nbytes for buffer in buffers)
            if wanted != payload_bytes:
                raise DataLoss(f"{self._client.address} sent {payload_bytes} bytes where {wanted} were due")
            connection.receive_payload(buffers, self._deadline)
        connection.drain(self._deadline)
        self._received_bytes += payload_bytes
        return reply

    def abort(self) -> None:
        """Wakes a thread that waits in `finish` or `next`, which then raises Unavailable. May be called by
        any."""
        with self._handover:
            if self._connection is not None:
                self._connection.abort()

    def cancel(self) -> None:
        """Gives up: the connection is closed, the peer's answer is lost. Nothing to do for a call that has
        ended."""
        with self._handover:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __enter__(self) -> PendingCall:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


def fresh(connection: Connection, last_used_s: float) -> bool:
    """Whether a connection between two exchanges can carry another one."""
    # Nothing is ever sent unasked: what can be read is the peer's end.
    return time.monotonic() - last_used_s < KEPT_S and not connection.wait_readable(Deadline.after(0))


def receive_reply(connection: Connection, deadline: Deadline) -> pb.DataReply:
    """One without a payload, on a connection that is the caller's. Raises what the peer raised, Unavailable,
    DeadlineExceeded, DataLoss."""
    head, _ = connection.receive_head(deadline)
    connection.drain(deadline)
    reply = reply_of(head, connection.peer)
    if reply.HasField("error"):
        raise from_detail(reply.error)
    return reply


def reply_of(head: bytes, peer: str) -> pb.DataReply:
    """What a peer has sent as a frame's head. Raises DataLoss for what is none."""
    try:
        return pb.DataReply.FromString(head)
    except DecodeError as error:
        raise DataLoss(f"{peer} sent a head that is no DataReply: run one version") from error


def last_word(connection: Connection) -> KVCommonsError | None:
    """A server that refuses a connection or a frame says why before it hangs up."""
    try:
        head, _ = connection.receive_head(Deadline.after(_LAST_WORD_S))
        reply = pb.DataReply.FromString(head)
    except (KVCommonsError, DecodeError):
        return None
    return from_detail(reply.error) if reply.HasField("error") else None
