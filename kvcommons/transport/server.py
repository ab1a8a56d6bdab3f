"""The answering end: one thread accepts, one thread serves each connection, one request at a time on each."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from google.protobuf.message import DecodeError

from kvcommons.errors import (
    DataLoss,
    Internal,
    InvalidInput,
    KVCommonsError,
    Overloaded,
    Unavailable,
    UnsupportedParameter,
    UntrustedPeer,
)
from kvcommons.pb import data_pb2 as pb
from kvcommons.security.credentials import OPEN, Credentials
from kvcommons.transport.addresses import listen
from kvcommons.transport.base import Bare, Connection, Limits, Observation, Observer
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.rings import RING_BYTES
from kvcommons.transport.sockets import ASK_S

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LOG = logging.getLogger(__name__)

# A connection on which nothing comes for so long is closed. Clients drop theirs much earlier (client.KEPT_S).
IDLE_S = 300.0
# A frame's head, from its first byte to its last.
_HEAD_S = 30.0
# What an error may take to reach a peer whose own deadline has passed, or that sent what is no frame.
_REFUSAL_S = 1.0
# Of a frame with a layer's head, until the session has read the deadline in it.
_LAYER_S = 60.0
_LAYER_OP = "attend_layer"


class ConnectionSession(Protocol):
    """What a handler keeps of one connection. It belongs to the connection's thread."""

    def answer_layer(self, head: bytes, exchange: Exchange) -> None:
        """Answers a frame with a layer's head, as a handler answers a DataRequest. It sets the exchange's
        deadline."""

    def close(self) -> None:
        """The connection has ended."""


class Exchange:
    """One request's payload and its replies. Belongs to the handler's thread, for the handler's time."""

    def __init__(
        self,
        connection: Connection,
        deadline: Deadline,
        payload_bytes: int,
        session: ConnectionSession | None = None,
    ) -> None:
        self._connection = connection
        self.deadline = deadline
        self.payload_bytes = payload_bytes
        self.session = session
        self.sent_bytes = 0
        self.replies = 0
        self.one_way = (
            False  # the handler sets it before it does anything: nothing is replied, errors neither
        )
        self.follow: Follower | None = None  # a handler's that has replied
        # The same: the connection is whoever's it is handed to, and the server's no more.
        self.take: Callable[[Connection], None] | None = None

    @property
    def unread_bytes(self) -> int:
        """Of the request's payload."""
        return self._connection.unread_bytes

    def receive_payload(self, into: Sequence[Buffer]) -> None:
        """Fills writable buffers, in order, with the next bytes of the payload; may be called several times.

        Raises InvalidInput when the peer sent less than that, and then receives nothing.
        """
        wanted = sum(memoryview(buffer).nbytes for buffer in into)
        if wanted > self.unread_bytes:
            raise InvalidInput(
                f"the payload has {self.unread_bytes} bytes left where {wanted} belong: send whole objects"
            )
        self._connection.receive_payload(into, self.deadline)

    def reply(self, reply: pb.DataReply, payload: Sequence[Buffer] = ()) -> None:
        """Sends one reply; what was not read of the request's payload is thrown away first, so that a peer
        that is still sending gets to reading. Only GetLayers is answered by more than one."""
        self._connection.drain(self.deadline)
        self._send(reply.SerializeToString(), payload, self.deadline)

    def discard_payload(self) -> None:
        """What was not read of it."""
        self._connection.drain(self.deadline)

    def reply_layer(self, head: bytes, payload: Sequence[Buffer]) -> None:
        """The same, with a layer's head."""
        self._connection.drain(self.deadline)
        self._send(head, payload, self.deadline, layer=True)

    def refuse(self, error: KVCommonsError) -> None:
        """Answers with an error, even past the deadline; used by the server for what a handler raises."""
        deadline = Deadline.after(max(_REFUSAL_S, self.deadline.left()))
        self._connection.drain(deadline)
        if self.one_way:
            return
        self._send(pb.DataReply(error=error.to_detail()).SerializeToString(), (), deadline)

    def _send(
        self, head: bytes, payload: Sequence[Buffer], deadline: Deadline, *, layer: bool = False
    ) -> None:
        try:
            self._connection.send(head, payload, deadline, layer=layer)
        except KVCommonsError as error:
            # Part of a frame may be out: nothing that follows would be understood.
            raise _ConnectionLost(error) from error
        self.replies += 1
        self.sent_bytes += sum(memoryview(buffer).nbytes for buffer in payload)


class _ConnectionLost(Exception):
    """The connection is of no more use; not for handlers to catch."""

    def __init__(self, cause: KVCommonsError) -> None:
        super().__init__(cause.message)
        self.cause = cause


Handler = Callable[[pb.DataRequest, Exchange], None]
# Answers requests that follow the one that was answered, straight at the connection's socket, and tells the
# observer of each: until something comes that is for the handler, or nothing for a while. Returns the error
# that a request is to be answered with, if one is; raises where the connection is of no more use.
Follower = Callable[[Bare, Observer], KVCommonsError | None]


class DataServer:
    """Serves data requests at one address. `handler` runs on the connections' threads, many at a time; what
    it raises becomes DataReply.error (anything but a KVCommonsError is logged and becomes Internal)."""

    def __init__(
        self,
        address: str,
        handler: Handler,
        *,
        name: str,
        limits: Limits | None = None,
        max_connections: int = 256,
        observer: Observer | None = None,
        ring_bytes: int = RING_BYTES,
        ask_s: float = ASK_S,
        session: Callable[[], ConnectionSession] | None = None,
        credentials: Credentials = OPEN,
    ) -> None:
        """Binds at once: `address` then says where, with the port that the system chose. `name` is for
        threads' names and logs, `ring_bytes` as in `listen`. `ask_s`: between two requests that follow each
        other so soon a connection's thread stays awake. `session` makes one for each connection; None: no
        layer is answered here. `credentials`: as in `listen`."""
        self._handler = handler
        self._session = session
        self._name = name
        self._limits = limits or Limits()
        self._max_connections = max_connections
        self._observer = observer
        self._ask_s = ask_s
        self._listener = listen(address, self._limits, ring_bytes=ring_bytes, credentials=credentials)
        self.address = self._listener.address
        self._lock = threading.Lock()
        self._serving: dict[Connection, None] = {}  # in the order in which they came
        self._threads: list[threading.Thread] = []  # those that serve, and some that have just done so
        self._stopping = False
        self._acceptor = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)

    def start(self) -> None:
        self._acceptor.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Closes the listener and all connections; calls under way fail at their peers with Unavailable.
        Returns whether all threads ended in time: a handler that computes cannot be interrupted."""
        deadline = Deadline.after(timeout_s)
        with self._lock:
            if self._stopping:
                return not any(thread.is_alive() for thread in self._threads)
            self._stopping = True
        self._listener.stop()
        if self._acceptor.ident is not None:
            self._acceptor.join(deadline.left())
        self._listener.close()
        with self._lock:
            serving, threads = list(self._serving), self._threads
        for connection in serving:
            connection.abort()
        for thread in threads:
            thread.join(deadline.left())
        late = [thread.name for thread in threads if thread.is_alive()]
        if late:
            _LOG.warning("%s: still busy after %.1f s: %s", self._name, timeout_s, ", ".join(late))
        return not late

    @property
    def connections(self) -> int:
        with self._lock:
            return len(self._serving)

    def _accept(self) -> None:
        number = 0
        while (connection := self._next_connection()) is not None:
            number += 1
            thread = threading.Thread(
                target=self._serve, args=(connection,), name=f"{self._name}-data-{number}", daemon=True
            )
            with self._lock:
                full = len(self._serving) >= self._max_connections and not self._made_room()
                if not full:
                    self._serving[connection] = None
                    self._threads = [one for one in self._threads if one.is_alive()]
            if full:
                self._refuse_connection(
                    connection, f"{self._name} serves {self._max_connections} connections already"
                )
                continue
            try:
                thread.start()
            except RuntimeError as error:  # no memory for its stack, or too many threads: others may end
                _LOG.warning("%s: cannot serve a connection: %s", self._name, error)
                with self._lock:
                    self._serving.pop(connection, None)
                self._refuse_connection(connection, f"{self._name} has no thread for a connection")
                continue
            with self._lock:
                self._threads.append(thread)

    def _made_room(self) -> bool:
        """Whether a connection whose peer has not shown who it is gave its place to a new one: strangers keep
        nobody out. With the lock held."""
        unknown = next((one for one in self._serving if not one.proven), None)
        if unknown is None:
            return False
        del self._serving[unknown]
        unknown.abort()
        return True

    def _next_connection(self) -> Connection | None:
        while True:
            try:
                return self._listener.accept()
            except OSError as error:
                # Out of descriptors, for one: connections that end give some back.
                _LOG.warning("%s: cannot accept: %s", self._name, error)
                time.sleep(0.1)

    def _refuse_connection(self, connection: Connection, why: str) -> None:
        error = Overloaded(f"{why}: retry later", retry_after_ms=200)
        try:
            # It fits into any socket's buffer: no waiting here.
            connection.send(
                pb.DataReply(error=error.to_detail()).SerializeToString(), (), Deadline.after(0), last=True
            )
        except KVCommonsError:
            pass  # gone already
        connection.close()

    def _serve(self, connection: Connection) -> None:
        connection.ask_for(self._ask_s)
        session = self._session() if self._session is not None else None
        give_to: Callable[[Connection], None] | None = None
        try:
            while give_to is None and not self._stopping and connection.wait_readable(Deadline.after(IDLE_S)):
                exchange = self._serve_one(connection, session)
                if exchange is None:
                    break
                give_to = exchange.take
        finally:
            with self._lock:
                self._serving.pop(connection, None)
            if session is not None:
                session.close()
            if give_to is None:
                connection.close()
            else:
                give_to(connection)

    def _serve_one(self, connection: Connection, session: ConnectionSession | None) -> Exchange | None:
        """None: the connection can carry no other exchange."""
        try:
            head, payload_bytes = connection.receive_head(Deadline.after(_HEAD_S))
        except UntrustedPeer as error:
            _LOG.warning("%s: refused a peer: %s", self._name, error.message)
            _refuse_garbage(connection, error)
            return None
        except Unavailable:
            return None  # how clients leave
        except KVCommonsError as error:
            _LOG.warning("%s: refused a peer: %s", self._name, error.message)
            _refuse_garbage(connection, error)
            return None
        started = time.monotonic()
        exchange = Exchange(connection, Deadline.after(_LAYER_S), payload_bytes, session)
        answer: Callable[[], None]
        if connection.layer_head:
            op, answer = _LAYER_OP, partial(self._answer_layer, head, exchange)
        else:
            try:
                request = pb.DataRequest.FromString(head)
            except DecodeError:
                why = "the head is no DataRequest: do both ends run one version?"
                _refuse_garbage(connection, DataLoss(why))
                return None
            op, answer = request.WhichOneof("op") or "none", partial(self._answer, request, exchange)
            exchange.deadline = Deadline.after(request.deadline_ms / 1000)
        failure: KVCommonsError | None = None
        usable = True
        try:
            failure = self._carry_out(op, answer, exchange)
        except _ConnectionLost as lost:
            failure, usable = lost.cause, False
        except KVCommonsError as error:  # while the refusal drained the payload
            failure, usable = error, False
        if self._observer is not None:
            self._observer(
                Observation(
                    op=op,
                    sent_bytes=exchange.sent_bytes,
                    received_bytes=payload_bytes - exchange.unread_bytes,
                    seconds=time.monotonic() - started,
                    error=failure.code if failure else "",
                )
            )
        if usable and exchange.follow is not None:
            usable = self._follow(exchange.follow, connection)
        return exchange if usable else None

    def _follow(self, follow: Follower, connection: Connection) -> bool:
        """Whether the connection can carry another exchange."""
        connection.receive_exactly()
        bare = connection.bare()
        if bare is None:
            return True
        try:
            error = follow(bare, self._observer or _unobserved)
            if error is not None:
                Exchange(connection, Deadline.after(0), 0).refuse(error)
        except (_ConnectionLost, KVCommonsError):
            return False
        except Exception:
            _LOG.exception("%s: what followed a request failed", self._name)
            return False
        return True

    def _answer(self, request: pb.DataRequest, exchange: Exchange) -> None:
        if not request.deadline_ms:
            raise InvalidInput("the request has no deadline: set deadline_ms", param="deadline_ms")
        self._handler(request, exchange)

    def _answer_layer(self, head: bytes, exchange: Exchange) -> None:
        if exchange.session is None:
            raise UnsupportedParameter(f"{self._name} attends over nobody's KV", param="op")
        exchange.session.answer_layer(head, exchange)

    def _carry_out(self, op: str, answer: Callable[[], None], exchange: Exchange) -> KVCommonsError | None:
        """The error that the request was answered with, if any. Raises _ConnectionLost."""
        try:
            answer()
            if exchange.one_way:
                exchange.discard_payload()
            elif not exchange.replies:
                raise Internal(f"{self._name} has no answer to {op}")
            return None
        except KVCommonsError as error:
            failure = error
        except _ConnectionLost:
            raise
        except Exception as error:
            _LOG.exception("%s: %s failed", self._name, op)
            failure = Internal(f"{self._name}: {type(error).__name__} in {op}; see its log")
        exchange.refuse(failure)
        return failure


def _unobserved(observation: Observation) -> None:
    pass


def _refuse_garbage(connection: Connection, error: KVCommonsError) -> None:
    """Says why, and reads on for a moment: closing at once would take the answer from a TCP peer that still
    sends."""
    deadline = Deadline.after(_REFUSAL_S)
    try:
        connection.send(pb.DataReply(error=error.to_detail()).SerializeToString(), (), deadline, last=True)
        connection.linger(deadline)
    except KVCommonsError:
        pass  # it has hung up, or keeps sending past the deadline
