"""From one stage to the next: plans and activations, on a connection of their own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from kvcommons.backend.memory import byte_view
from kvcommons.errors import KVCommonsError
from kvcommons.pb import data_pb2 as pb
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.transport.base import Connection
from kvcommons.transport.client import fresh
from kvcommons.transport.deadline import Deadline

if TYPE_CHECKING:
    from typing_extensions import Buffer

SEND_S = 10.0  # of one plan: the next stage takes what it is sent at once, whatever it computes


class StageLink:
    """One thread at a time; `close` may be called by any."""

    def __init__(self, address: str, epoch: int, dialer: Dialer = UNSECURED) -> None:
        self._client = dialer.client(address, "stage")
        self._epoch = epoch
        self._sent = 0
        self._used_s = 0.0
        self._connection: Connection | None = None

    def send(
        self,
        changes: Sequence[pb.StageChange],
        spans: Sequence[pb.StageSpan] = (),
        hidden: Tensor | None = None,
        *,
        iteration: bool = False,
    ) -> None:
        """`hidden` [rows of the spans, hidden] in host memory. Returns when it is sent: nobody answers.
        Raises Unavailable, DeadlineExceeded."""
        self._sent += 1
        deadline = Deadline.after(SEND_S)
        plan = pb.StagePlan(
            epoch=self._epoch, number=self._sent, changes=changes, spans=spans, iteration=iteration
        )
        request = pb.DataRequest(deadline_ms=deadline.left_ms(), stage_plan=plan)
        payload: list[Buffer] = [] if hidden is None else [byte_view(hidden)]
        head = request.SerializeToString()
        connection = self._connection
        # One that is idle for long is closed by the other end; had that lost a plan, the numbers would tell.
        if connection is not None and not fresh(connection, self._used_s):
            connection.close()
            connection = None
        if connection is None:
            connection = self._connect(deadline)
        connection.send(head, payload, deadline)
        self._used_s = time.monotonic()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        self._client.close()
        if connection is not None:
            connection.abort()
            connection.close()

    def _connect(self, deadline: Deadline) -> Connection:
        try:
            self._connection = self._client.connect(deadline)
        except KVCommonsError:
            self._connection = None
            raise
        return self._connection
