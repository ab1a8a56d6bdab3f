"""A debtor's plans: each is open at one creditor, on a connection of its own, from one iteration to the
next."""

from __future__ import annotations

import enum
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from kvcommons.attention.native.exchange import TransferOutcome
from kvcommons.errors import DataLoss, KVCommonsError, Unavailable, from_detail
from kvcommons.holder.layer_head import LayerHead, LayerReply
from kvcommons.holder.plan import PlanRow, difference
from kvcommons.pb import data_pb2 as pb
from kvcommons.telemetry.trace import current_traceparent
from kvcommons.transport.base import Bare, Connection, Observation, SendBroken
from kvcommons.transport.client import DataClient, fresh, last_word, reply_of
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.sockets import gone, waited

if TYPE_CHECKING:
    from typing_extensions import Buffer

# The only one of its connection.
PLAN = 1
# Batches in mini-batches alternate; a creditor has a thread for each connection.
_KEPT_MAX = 16
# A plan that nobody used for so long is another batch's to have, whatever its rows.
_LEFT_S = 1.0
_STEP_MAX = 1 << 31


class PlanState(enum.Enum):
    CLOSED = "there is no connection, or its creditor does not know the plan as it is here"
    OPEN = "the creditor was sent it as it is here, ahead of any layer"


class _Refused(Exception):
    """By an answer, after which the connection can be used."""

    def __init__(self, error: KVCommonsError) -> None:
        super().__init__(error.message)
        self.error = error


class PlanConnection:
    """One thread at a time. After an error it is closed, and may be prepared again."""

    def __init__(self, client: DataClient) -> None:
        self.rows: list[PlanRow] = []  # as of step 0
        self.revision = 0
        self.step = 0
        self.used_s = 0.0
        self.user: object = None  # who has prepared it last
        # The connection has carried something before: a layer of which nothing was sent may be sent again on
        # a new one.
        self.kept = False
        self._client = client
        self._connection: Connection | None = None
        self._state = PlanState.CLOSED
        self._trace = ""

    @property
    def bare(self) -> Bare | None:
        """For the native path; None where the connection has no socket of its own."""
        return self._connection.bare() if self._connection is not None else None

    def prepare(self, rows: Sequence[PlanRow], deadline: Deadline) -> None:
        """Has the creditor attend over `rows` from the next layer on: opens the plan or changes it, without
        waiting for an answer. Raises Unavailable, DeadlineExceeded."""
        step = self._step_of(rows)
        based = [row.moved(-step) for row in rows]
        opened = self._state is PlanState.OPEN and current_traceparent() == self._trace
        before, self.rows, self.step = self.rows, based, step
        if not opened or not self._alive():
            self._open(deadline)
        elif before != based:
            change = difference(before, based)
            self.revision += 1
            message = pb.ChangePlan(plan=PLAN, revision=self.revision, step=step, removed=change.removed)
            for index, row in change.placed:
                message.placed.add(index=index, row=row.moved(step).message())
            self._tell(pb.DataRequest(change_plan=message), deadline)

    def advance(self, steps: int, deadline: Deadline) -> None:
        """The same rows, so many steps on. Raises as `prepare`."""
        self.step += steps
        if self.step >= _STEP_MAX or self._state is not PlanState.OPEN or not self._alive():
            self._open(deadline)

    def reopen(self, deadline: Deadline, *, connection: bool) -> None:
        """The plan as it is, for the creditor knows it no more; on a new `connection`, or on this one."""
        if connection:
            self.drop()
        self._open(deadline)

    def send(
        self, layer: int, queries: int, appended: int, payload: Sequence[Buffer], deadline: Deadline
    ) -> None:
        """A layer, in Python. Raises Unavailable, DeadlineExceeded."""
        head = LayerHead(
            layer=layer, plan=PLAN, revision=self.revision, step=self.step,
            deadline_ms=max(1, deadline.left_ms()), queries=queries, appended=appended,
        )  # fmt: skip
        try:
            self._send(head.pack(), payload, deadline, layer=True)
        except SendBroken as error:
            if not self.kept or error.sent_bytes:
                raise
            self.reopen(deadline, connection=True)
            self._send(head._replace(revision=0).pack(), payload, deadline, layer=True)

    def receive(self, layer: int, into: Sequence[Buffer], deadline: Deadline) -> LayerReply:
        """Its answer, with the partial in `into`. Raises what the creditor raised (UnknownPlan: `reopen` it
        and send the layer again), Unavailable, DeadlineExceeded, DataLoss."""
        connection = self._open_connection()
        try:
            head, payload_bytes = connection.receive_head(deadline)
            if not connection.layer_head:
                connection.drain(deadline)
                raise _Refused(self._refusal(head, payload_bytes))
            reply = LayerReply.unpack(head)
            due = sum(memoryview(buffer).nbytes for buffer in into)
            if (reply.layer, reply.plan, reply.step, payload_bytes) != (layer, PLAN, self.step, due):
                raise DataLoss(
                    f"{self._client.address} answered layer {reply.layer} of plan {reply.plan} at step "
                    f"{reply.step} "
                    f"by {payload_bytes} bytes, where {due} of layer {layer}, plan {PLAN}, step {self.step} "
                    "were due"
                )
            connection.receive_payload(into, deadline)
        except _Refused as refused:
            self._state = PlanState.CLOSED
            raise refused.error from None
        except BaseException:
            self.drop()
            raise
        self.used_s, self.kept = time.monotonic(), True
        if connection.peer_leaves:
            self.drop()
        return reply

    def lost(self, deadline: Deadline) -> dict[int, KVCommonsError]:
        """Rows that the creditor has lost, each with why. Raises as `receive`."""
        connection = self._open_connection()
        request = pb.DataRequest(
            deadline_ms=max(1, deadline.left_ms()), describe_plan=pb.DescribePlan(plan=PLAN)
        )
        try:
            connection.send(request.SerializeToString(), (), deadline)
            head, payload_bytes = connection.receive_head(deadline)
            connection.drain(deadline)
            reply = pb.DataReply.FromString(head)
        except (KVCommonsError, DecodeError):
            self.drop()
            raise
        # It is opened anew: what is lost stays lost.
        self._state = PlanState.CLOSED
        if reply.HasField("error"):
            raise self._refusal(head, payload_bytes)
        return {
            one.index: from_detail(one.error)
            for one in reply.plan_description.lost
            if one.index < len(self.rows)
        }

    def unsent(self, outcome: TransferOutcome, code: int) -> KVCommonsError:
        """Why a layer was not sent on the native path; `code` is an errno. The connection is closed."""
        connection = self._open_connection()
        error: KVCommonsError = waited(connection.peer, "to send to")
        if outcome is not TransferOutcome.LATE:
            error = last_word(connection) or gone(connection.peer, OSError(code, os.strerror(code)))
        self.drop()
        return error

    def unanswered(self, outcome: TransferOutcome, code: int) -> KVCommonsError:
        """Why it was not answered; without an errno the peer has ended in order."""
        peer = self._open_connection().peer
        self.drop()
        if outcome is TransferOutcome.LATE:
            return waited(peer, "for")
        ended = Unavailable(f"{peer} closed the connection")
        return gone(peer, OSError(code, os.strerror(code))) if code else ended

    def unreceive(self, received: Buffer) -> None:
        """What the native path has taken of an answer that `receive` has to look at."""
        self._open_connection().unreceive(received)

    def observe(self, began_s: float, ended_s: float, sent: int, received: int, error: str = "") -> None:
        """A layer, for the client's observer."""
        seconds = ended_s - began_s
        self._client.observe(
            Observation(
                op="attend_layer", sent_bytes=sent, received_bytes=received, seconds=seconds, error=error
            )
        )

    def drop(self) -> None:
        """In the middle of a layer, or for good."""
        connection, self._connection, self._state = self._connection, None, PlanState.CLOSED
        if connection is not None:
            connection.close()

    def _step_of(self, rows: Sequence[PlanRow]) -> int:
        """Of the plan, where these are its rows: such that rows which it had stay as they are."""
        known = {row.place: row.position for row in self.rows}
        for row in rows:
            before = known.get(row.place)
            if before is not None:
                step = row.position - before
                return step if 0 <= step < _STEP_MAX else 0
        return self.step if self.step < _STEP_MAX else 0

    def _alive(self) -> bool:
        return self._connection is not None and fresh(self._connection, self.used_s)

    def _open(self, deadline: Deadline) -> None:
        if self.step >= _STEP_MAX:
            self.rows, self.step = [row.moved(self.step) for row in self.rows], 0
        if self._connection is None or not self._alive():
            self.drop()
            self._connection, self.kept = self._client.connect(deadline), False
            self.used_s = time.monotonic()
        self.revision = 0
        self._trace = current_traceparent()
        rows = [row.moved(self.step).message() for row in self.rows]
        message = pb.OpenPlan(plan=PLAN, step=self.step, rows=rows)
        request = pb.DataRequest(traceparent=self._trace, open_plan=message)
        self._tell(request, deadline)
        self._state = PlanState.OPEN

    def _tell(self, request: pb.DataRequest, deadline: Deadline) -> None:
        """What is not answered."""
        request.deadline_ms = max(1, deadline.left_ms())
        try:
            self._send(request.SerializeToString(), (), deadline)
        except SendBroken as error:
            if not self.kept or error.sent_bytes:
                raise
            self.reopen(deadline, connection=True)  # with all that it has now

    def _send(
        self, head: bytes, payload: Sequence[Buffer], deadline: Deadline, *, layer: bool = False
    ) -> None:
        connection = self._open_connection()
        try:
            connection.send(head, payload, deadline, layer=layer)
        except SendBroken as error:
            if error.sent_bytes or not self.kept:
                word = last_word(connection)
                self.drop()
                if word is not None:
                    raise word from error
            raise
        except BaseException:
            self.drop()
            raise

    def _open_connection(self) -> Connection:
        assert self._connection is not None, "the plan was not prepared"
        return self._connection

    def _refusal(self, head: bytes, payload_bytes: int) -> KVCommonsError:
        """What a DataReply says that is no answer to a layer."""
        try:
            reply = reply_of(head, self._client.address)
        except DataLoss as error:
            return error
        if reply.HasField("error"):
            return from_detail(reply.error)
        return DataLoss(
            f"{self._client.address} sent {payload_bytes} bytes of another reply where a layer's were due"
        )


class PlanPool:
    """A debtor's plans at one data address. Thread-safe."""

    def __init__(self, client: DataClient) -> None:
        self.client = client
        self._lock = threading.Lock()
        self._idle: list[PlanConnection] = []
        self._closed = False

    def take(self, rows: Sequence[PlanRow], preferred: PlanConnection | None = None) -> PlanConnection:
        """The `preferred` one if it is idle, else the one that has most of these rows, or that was left, or a
        new one. `give` it back."""
        with self._lock:
            if preferred is not None and preferred in self._idle:
                self._idle.remove(preferred)
                return preferred
            wanted = {row.place for row in rows}
            best, most = None, 0
            for plan in self._idle:
                shared = len(wanted.intersection(row.place for row in plan.rows))
                if shared > most:
                    best, most = plan, shared
            if best is None and self._idle:
                oldest = min(self._idle, key=lambda plan: plan.used_s)
                if time.monotonic() - oldest.used_s > _LEFT_S:
                    best = oldest
            if best is None:
                return PlanConnection(self.client)
            self._idle.remove(best)
            return best

    def give(self, plan: PlanConnection) -> None:
        plan.used_s = time.monotonic()
        with self._lock:
            if not self._closed:
                self._idle.append(plan)
                plan = self._idle.pop(0) if len(self._idle) > _KEPT_MAX else None  # type: ignore[assignment]
        if plan is not None:
            plan.drop()

    def close(self) -> None:
        """Those in use close when they are given back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for plan in idle:
            plan.drop()
        self.client.close()
