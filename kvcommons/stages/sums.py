"""Sums over the ranks of one stage, on connections between any two of them.

A part goes from each rank to each other one where it is small, for then the way there is what takes time.
Of a large one each rank adds up a share, and sends that sum to the others: so each sends and receives
2 (ranks - 1) / ranks of it, the least there is. Parts are added in the order of the ranks, so all have the
same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from kvcommons.backend.memory import byte_view
from kvcommons.errors import DataLoss
from kvcommons.transport.base import Connection
from kvcommons.transport.deadline import Deadline

# Any transport takes so much from one end before the other end reads: up to here all ranks send first, and
# receive then. Beyond, of any two the lower one does, and the higher one the other way round.
AT_ONCE_BYTES = 32 << 10


class RankSums:
    """One thread sums up; `close` may be called by any."""

    def __init__(self, number: int, connections: Mapping[int, Connection]) -> None:
        """`number`: of this rank. `connections`: to the others, by their numbers; they are this object's."""
        self._number = number
        # All ranks go through pairs in one order, so none waits for another in a circle.
        self._connections = dict(sorted(connections.items()))
        self._received = torch.empty(0, dtype=torch.uint8)
        self._using = threading.Lock()

    def sum(self, part: Tensor, deadline: Deadline) -> None:
        """In place: `part` [n], contiguous, in host memory, of one n and dtype at all ranks. Raises
        Unavailable, DeadlineExceeded, DataLoss; this is of no more use then."""
        with self._using:
            if part.nbytes <= AT_ONCE_BYTES:
                others = self._buffers(part)
                self._exchange(dict.fromkeys(others, part), others, deadline, at_once=True)
                self._add(part, others)
                return
            shares = part.tensor_split(len(self._connections) + 1)
            own = shares[self._number]
            others = self._buffers(own)
            at_once = shares[0].nbytes <= AT_ONCE_BYTES  # the largest: all ranks have to decide alike
            self._exchange({number: shares[number] for number in others}, others, deadline, at_once=at_once)
            self._add(own, others)
            sums = {number: shares[number] for number in others}
            self._exchange(dict.fromkeys(others, own), sums, deadline, at_once=at_once)

    def close(self) -> None:
        """A sum under way fails."""
        for connection in self._connections.values():
            connection.abort()
        with self._using:
            for connection in self._connections.values():
                connection.close()

    def _exchange(
        self, sent: Mapping[int, Tensor], into: Mapping[int, Tensor], deadline: Deadline, *, at_once: bool
    ) -> None:
        """With each other rank: what it is sent, and into what it is received from there."""
        if at_once:
            for number, connection in self._connections.items():
                connection.send(b"", [byte_view(sent[number])], deadline)
        for number, connection in self._connections.items():
            if not at_once and self._number < number:
                connection.send(b"", [byte_view(sent[number])], deadline)
            _receive(connection, into[number], deadline)
            if not at_once and self._number > number:
                connection.send(b"", [byte_view(sent[number])], deadline)

    def _add(self, own: Tensor, others: Mapping[int, Tensor]) -> None:
        """Into `own`; of `others` nothing is left."""
        first, *rest = (others.get(number, own) for number in range(len(others) + 1))
        for one in rest[:-1]:
            torch.add(first, one, out=first)
        torch.add(first, rest[-1], out=own)

    def _buffers(self, like: Tensor) -> dict[int, Tensor]:
        """One for each other rank, in memory that is kept: the system takes long to give some."""
        size = like.nbytes
        if self._received.nbytes < size * len(self._connections):
            self._received = torch.empty(size * len(self._connections), dtype=torch.uint8)
        parts = self._received[: size * len(self._connections)].view(like.dtype)
        return dict(zip(self._connections, parts.view(len(self._connections), -1), strict=True))


def _receive(connection: Connection, into: Tensor, deadline: Deadline) -> None:
    _, size = connection.receive_head(deadline)
    if size != into.nbytes:
        raise DataLoss(f"{connection.peer} sums up {size} bytes where {into.nbytes} are due")
    connection.receive_payload([byte_view(into)], deadline)
