"""An epoch over the data plane: one connection down the line of stages, and one to each process of the group,
on which it reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from kvcommons.errors import KVCommonsError
from kvcommons.pb import data_pb2 as pb
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.stages.epoch import EpochState, StageAddress
from kvcommons.stages.iteration import StageIteration
from kvcommons.stages.link import StageLink
from kvcommons.transport.base import Connection
from kvcommons.transport.client import receive_reply
from kvcommons.transport.deadline import Deadline

if TYPE_CHECKING:
    from kvcommons.stages.group import StageGroup

JOIN_S = 20.0  # a stage that has to end another epoch first waits until its blocks are quiet
SILENCE_S = 5.0  # reports come twice a second


class ConnectedEpoch(EpochState):
    """Its end comes with the first connection that ends."""

    def __init__(
        self, group: StageGroup, members: Sequence[StageAddress], dialer: Dialer = UNSECURED
    ) -> None:
        tensor = group.ranks.rank.ranks if group.ranks is not None else 1
        super().__init__(time.time_ns(), members, stages=(len(members) + 1) // tensor)
        self._group = group
        self._tensor = tensor
        self._addresses = ["", *(member.data_address for member in members)]
        self._link = self._open(tensor, dialer) if len(self._addresses) > tensor else None
        self._beside = [self._open(rank, dialer) for rank in range(1, tensor)]
        self._sending = threading.Lock()  # loads begin and end on threads of their own
        self._clients = [dialer.client(member.data_address, "stage") for member in members]
        self._reports: list[Connection] = []
        self._followed = False  # threads have the connections, and close them

    def join(self, writer: str) -> None:
        core, deadline = self._group.core, Deadline.after(JOIN_S)
        ranks, tensor = self._group.ranks, self._tensor
        for member, client in zip(self.members, self._clients, strict=True):
            connection = client.connect(deadline)
            self._reports.append(connection)
            stage, rank = divmod(member.number, tensor)
            next_number = member.number + tensor
            leads = not rank and next_number < len(self._addresses)
            join = pb.JoinStages(
                epoch=self.number,
                model=core.info.fingerprint,
                number=stage,
                blocks=core.allocator.total,
                next_address=self._addresses[next_number] if leads else "",
                writer=writer,
                rank=rank,
                above=self._addresses[member.number + 1 : (stage + 1) * tensor],
            )
            request = pb.DataRequest(deadline_ms=deadline.left_ms(), join_stages=join)
            connection.send(request.SerializeToString(), (), deadline)
        for connection in self._reports:
            receive_reply(connection, deadline)
        if ranks is not None:
            ranks.join(self.number, self._addresses[1:tensor])

    def follow(self) -> None:
        self._followed = True
        for member, connection in zip(self.members, self._reports, strict=True):
            name, arguments = f"member {member.number}", (member.number, connection)
            threading.Thread(target=self._follow, args=arguments, name=name, daemon=True).start()

    def send(
        self,
        changes: Sequence[pb.StageChange],
        spans: Sequence[pb.StageSpan] = (),
        iteration: StageIteration | None = None,
    ) -> None:
        try:
            hidden = None if iteration is None else iteration.leaving
            with self._sending:
                if self._link is not None:
                    self._link.send(changes, spans, hidden, iteration=iteration is not None)
                for link in self._beside if iteration is None else ():
                    link.send(changes)
        except KVCommonsError as error:
            self._tell_lost(error)

    def share(self, spans: Sequence[pb.StageSpan], hidden: Tensor) -> None:
        try:
            with self._sending:
                for link in self._beside:
                    link.send((), spans, hidden)
        except KVCommonsError as error:
            self._tell_lost(error)

    def close(self) -> None:
        for link in [*self._beside, *([] if self._link is None else [self._link])]:
            link.close()
        if self._group.ranks is not None:
            self._group.ranks.leave(self.number)
        for client in self._clients:
            client.close()
        for connection in self._reports:
            connection.abort()
            if not self._followed:
                connection.close()

    def _open(self, number: int, dialer: Dialer) -> StageLink:
        return StageLink(self._addresses[number], self.number, dialer)

    def _follow(self, stage: int, connection: Connection) -> None:
        """A thread of its own for each member."""
        try:
            while True:
                report = receive_reply(connection, Deadline.after(SILENCE_S)).stage_report
                for ended in report.loads:  # at once: the engine's thread may be waiting for it
                    load = self.loads.get(ended.load)
                    if load is not None:
                        load.ended_at(stage, ended.blocks)
                if report.ByteSize():
                    self._group.engine.post(partial(self._group.hear, self, stage, report))
        except KVCommonsError as error:
            self._tell_lost(error)
        finally:
            connection.close()

    def _tell_lost(self, error: KVCommonsError) -> None:
        self._group.engine.post(partial(self._group.lost, self, error))
