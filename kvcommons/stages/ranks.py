"""The ranks of one stage, from one of them: how they come together, and sum up what each has computed.

An epoch has connections of its own, one between any two ranks: each calls those above it at their data
planes. A rank that dies closes them, and its peers' sums fail at once; one that stands still makes them fail
when their time is over. Whoever fails leaves, which closes its own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from kvcommons.backend.interface import Device
from kvcommons.errors import DeadlineExceeded, InvalidInput, KVCommonsError, StaleEpoch, Unavailable
from kvcommons.model.tensor_rank import TensorRank
from kvcommons.pb import data_pb2 as pb
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.stages.sums import RankSums
from kvcommons.transport.base import Connection
from kvcommons.transport.client import receive_reply
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.server import Exchange

JOIN_S = 10.0  # for all ranks of a stage to meet
SUM_S = 5.0  # of one sum, the wait for the slowest rank included


class _Came(NamedTuple):
    """A lower rank's connection; `number` grows with each that is welcomed."""

    epoch: int
    number: int
    connection: Connection


class RankGroup:
    """Sums belong to one thread at a time; it is joined and left by any."""

    def __init__(self, rank: TensorRank, device: Device, dialer: Dialer = UNSECURED) -> None:
        """`device`: where summands are."""
        self.rank = rank
        self._device = device
        self._dialer = dialer
        self._changed = threading.Condition()
        self._welcomed = 0  # connections of lower ranks
        self._came: dict[int, _Came] = {}  # by rank: not joined yet
        self._epoch = self._left = 0  # the newest that was joined, and that was left
        self._calling: list[Connection] = []  # of a rank that joins
        self._entered = 0  # by the process that begins iterations
        self._sums: RankSums | None = None

    def welcome(self, join: pb.JoinRanks, exchange: Exchange) -> None:
        """A lower rank's connection, for an epoch that this one may not have heard of yet. Raises StaleEpoch
        for one that is over, InvalidInput for a rank that has not to call."""
        if join.rank >= self.rank.number:
            raise InvalidInput(
                f"rank {join.rank} called rank {self.rank.number}, and each calls those above it",
                param="rank",
            )
        with self._changed:
            if join.epoch <= max(self._epoch, self._left):
                raise StaleEpoch("the ranks were put together anew")
            self._welcomed += 1
            number = self._welcomed
        exchange.reply(pb.DataReply(done=pb.Done()))
        exchange.take = lambda connection: self._keep(join.rank, _Came(join.epoch, number, connection))

    def join(self, epoch: int, above: Sequence[str]) -> None:
        """Blocks until all ranks of the stage are there. `above`: data addresses of those that this one
        calls, in their order. Raises Unavailable, at once where it is left meanwhile."""
        deadline = Deadline.after(JOIN_S)
        connections: dict[int, Connection] = {}
        try:
            for number, address in enumerate(above, start=self.rank.number + 1):
                connections[number] = self._call(address, epoch, deadline)
            self._await_lower(epoch, connections, deadline)
        except KVCommonsError as error:
            for connection in connections.values():
                connection.close()
            raise Unavailable(f"the ranks of a stage did not meet: {error.message}") from error
        finally:
            with self._changed:
                self._calling.clear()

    def leave(self, epoch: int) -> None:
        """Closes what this rank has with the others in that epoch, and before: a sum under way fails, and who
        joins gives up. Any number of times."""
        with self._changed:
            self._left = max(self._left, epoch)
            self._changed.notify_all()
            for connection in self._calling:
                connection.abort()
            sums = self._sums if self._epoch == epoch else None
            if sums is not None:
                self._sums = None
            over = [number for number, came in self._came.items() if came.epoch <= epoch]
            for number in over:
                self._came.pop(number).connection.close()
        if sums is not None:
            sums.close()

    def enter(self, epoch: int) -> None:
        """What is summed up from here on belongs to that epoch, also if another one is joined meanwhile."""
        self._entered = epoch

    def sum(self, part: Tensor) -> Tensor:
        """Of what all ranks have, in the dtype of `part` [rows, hidden], with the same bits at each. Before
        the first epoch, where this rank measures what computing takes, its own part. Raises Unavailable
        where a rank is gone, or too slow."""
        with self._changed:
            epoch, sums = self._epoch, self._sums
        if not epoch:
            return part
        if sums is None or self._entered not in (0, epoch):
            raise Unavailable("this rank belongs to no epoch")
        held = self._device.fetch(part.contiguous())
        try:
            sums.sum(held.view(-1), Deadline.after(SUM_S))
        except KVCommonsError as error:
            self.leave(epoch)
            raise Unavailable(f"a rank of this stage is gone, or stands still: {error.message}") from error
        return self._device.upload(held)

    def _call(self, address: str, epoch: int, deadline: Deadline) -> Connection:
        connection = self._dialer.client(address, "stage").connect(deadline)
        with self._changed:
            self._calling.append(connection)
        try:
            self._check(epoch)
            join = pb.JoinRanks(epoch=epoch, rank=self.rank.number)
            request = pb.DataRequest(deadline_ms=deadline.left_ms(), join_ranks=join)
            connection.send(request.SerializeToString(), (), deadline)
            receive_reply(connection, deadline)
        except BaseException:
            connection.close()
            raise
        return connection

    def _await_lower(self, epoch: int, connections: dict[int, Connection], deadline: Deadline) -> None:
        """Adds those of the ranks that call this one, and has the sums begin."""
        with self._changed:
            for number in range(self.rank.number):
                if not self._changed.wait_for(partial(self._here, number, epoch), deadline.left()):
                    raise DeadlineExceeded(f"rank {number} did not come")
                self._check(epoch)
                connections[number] = self._came.pop(number).connection
            self._check(epoch)
            self._epoch, self._sums = epoch, RankSums(self.rank.number, connections)

    def _here(self, number: int, epoch: int) -> bool:
        """Or it is not waited for any more."""
        came = self._came.get(number)
        return epoch <= self._left or (came is not None and came.epoch == epoch)

    def _check(self, epoch: int) -> None:
        if epoch <= self._left:
            raise StaleEpoch("the epoch has ended")

    def _keep(self, rank: int, came: _Came) -> None:
        """Unless the epoch was left meanwhile, or the rank's next connection was kept before this one: each
        is on a thread of its own."""
        with self._changed:
            other = self._came.get(rank)
            if came.epoch <= self._left or (other is not None and other.number > came.number):
                came.connection.close()
                return
            if other is not None:
                other.connection.close()
            self._came[rank] = came
            self._changed.notify_all()
