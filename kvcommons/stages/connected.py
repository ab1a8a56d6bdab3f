"""An epoch over the data plane: one connection down the line of stages, and one to each process of the group,
on which it reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from torch import Tensor

from kvcommons.errors import DataLoss, KVCommonsError, from_detail
from kvcommons.pb import data_pb2 as pb
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.stages.epoch import EpochState, StageAddress
from kvcommons.stages.iteration import StageIteration
from kvcommons.stages.link import StageLink
from kvcommons.stages.ranks import Meeting
from kvcommons.transport.base import Connection
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
        self._meeting: Meeting | None = None
        self._sending = threading.Lock()  # loads begin and end on threads of their own
        self._clients = [dialer.client(member.data_address, "stage") for member in members]
        self._reports: list[Connection] = []
        self._followed = False  # threads have the connections, and close them

    def join(self, writer: str) -> None:
        core, deadline = self._group.core, Deadline.after(JOIN_S)
        ranks, tensor = self._group.ranks, self._tensor
        if ranks is not None:
            self._meeting = Meeting(ranks.host, ranks.dialer.credentials)
        for member, client in zip(self.members, self._clients, strict=True):
            connection = client.connect(deadline)
            self._reports.append(connection)
            (stage, rank), first = divmod(member.number, tensor), member.number + 1
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
                meeting="" if self._meeting is None else self._meeting.address,
                beside=[] if rank else self._addresses[first : first + tensor - 1],
            )
            request = pb.DataRequest(deadline_ms=deadline.left_ms(), join_stages=join)
            connection.send(request.SerializeToString(), (), deadline)
        for connection in self._reports:
            _receive(connection, deadline)
        if ranks is not None and self._meeting is not None:
            ranks.join(self.number, 0, self._meeting.address)

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
            self._group.ranks.leave()
        if self._meeting is not None:
            self._meeting.close()
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
                report = _receive(connection, Deadline.after(SILENCE_S))
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


def _receive(connection: Connection, deadline: Deadline) -> pb.StageReport:
    """Raises what the stage raised, Unavailable, DeadlineExceeded, DataLoss."""
    head, _ = connection.receive_head(deadline)
    connection.drain(deadline)
    try:
        reply = pb.DataReply.FromString(head)
    except DecodeError as error:
        raise DataLoss(f"{connection.peer} sent a head that is no DataReply: run one version") from error
    if reply.HasField("error"):
        raise from_detail(reply.error)
    return reply.stage_report
