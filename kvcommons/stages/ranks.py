"""The ranks of one stage, from one of them: what each has computed is summed over `torch.distributed`.

An epoch has a process group of its own. A rank that dies closes its sockets, and its peers' sums fail at
once; one that stands still makes them fail when their time is over. Whoever fails leaves, which closes its
own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from datetime import timedelta
from typing import TypeAlias

import torch.distributed
from torch import Tensor

from kvcommons.backend.interface import Device
from kvcommons.errors import (
    DeadlineExceeded,
    InvalidInput,
    KVCommonsError,
    Unavailable,
    UnsupportedParameter,
)
from kvcommons.model.tensor_rank import TensorRank
from kvcommons.pb import data_pb2 as pb
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.security.credentials import OPEN, Credentials
from kvcommons.transport.client import DataClient
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.server import DataServer, Exchange

JOIN_S = 10.0  # for all ranks of a stage to meet
SUM_S = 5.0  # of one sum, the wait for the slowest rank included
_CLOSE_S = 1.0  # for a meeting's threads to end
_SAID_MAX, _SAID_BYTES_MAX = 4096, 65_536  # keys of a meeting, and one with its value

ProcessGroup: TypeAlias = torch.distributed.ProcessGroupGloo


class Meeting:
    """Where the ranks of a group's stages tell each other their addresses: one for each epoch, at the first
    stage's first rank. torch's own store waits without end for a server that is stopped."""

    def __init__(self, host: str, credentials: Credentials = OPEN) -> None:
        """`host`: where it listens. Raises Unavailable."""
        self._known: dict[str, bytes] = {}
        self._changed = threading.Condition()
        try:
            self._server = DataServer(f"tcp:{host}:0", self._answer, name="meeting", credentials=credentials)
        except (OSError, KVCommonsError) as error:
            raise Unavailable(f"ranks cannot meet at rank_host = {host!r}: {error}") from error
        self.address = self._server.address
        self._server.start()

    def close(self) -> None:
        self._server.stop(_CLOSE_S)

    def _answer(self, request: pb.DataRequest, exchange: Exchange) -> None:
        if request.WhichOneof("op") != "meet_ranks":
            raise UnsupportedParameter("ranks meet here, and nothing else is answered", param="op")
        key, value = request.meet_ranks.key, request.meet_ranks.value
        with self._changed:
            if value and len(key) + len(value) <= _SAID_BYTES_MAX and len(self._known) < _SAID_MAX:
                self._known[key] = value
                self._changed.notify_all()
            elif value:
                raise InvalidInput("ranks say no more than their addresses here", param="value")
            elif not self._changed.wait_for(lambda: key in self._known, exchange.deadline.left()):
                raise DeadlineExceeded("another rank did not come to the meeting")
            value = self._known[key]
        exchange.reply(pb.DataReply(met_ranks=pb.MetRanks(value=value)))


class _MeetingStore(torch.distributed.Store):  # type: ignore[misc]
    """A meeting, as a process group asks for it. Raises what a call does, by way of RuntimeError."""

    def __init__(self, client: DataClient, prefix: str, deadline: Deadline) -> None:
        super().__init__()
        self._client, self._prefix, self._deadline = client, prefix, deadline

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        return self._ask(key, b"")

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._ask(key, b"")

    def _ask(self, key: str, value: bytes) -> bytes:
        meet = pb.MeetRanks(key=f"{self._prefix}/{key}", value=value)
        request = pb.DataRequest(deadline_ms=self._deadline.left_ms(), meet_ranks=meet)
        try:
            return self._client.call(request, deadline=self._deadline).met_ranks.value
        except KVCommonsError as error:
            raise RuntimeError(error.message) from error


class RankGroup:
    """Sums belong to one thread at a time; it is joined and left by any."""

    def __init__(self, rank: TensorRank, host: str, device: Device, dialer: Dialer = UNSECURED) -> None:
        """`host`: the address at which this rank listens for the others. `device`: where summands are."""
        self._device = device
        self.rank = rank
        self.host = host
        self.dialer = dialer
        self._lock = threading.Lock()
        self._group: ProcessGroup | None = None
        self._joined = rank.ranks == 1

    def join(self, epoch: int, stage: int, meeting: str) -> None:
        """Blocks until all ranks of the stage are there. Raises Unavailable."""
        if self.rank.ranks == 1:
            return
        deadline = Deadline.after(JOIN_S)
        options = ProcessGroup._Options()
        options._timeout = timedelta(seconds=JOIN_S)
        options._threads = 1
        with closing(self.dialer.client(meeting, "stage")) as client:
            store = _MeetingStore(client, f"{epoch:x}/{stage}", deadline)
            try:
                options._devices = [ProcessGroup.create_device(hostname=self.host)]
                group = ProcessGroup(store, self.rank.number, self.rank.ranks, options)
            except RuntimeError as error:
                raise Unavailable(
                    f"the ranks of stage {stage} did not meet: {_first_line(error)}; rank_host has to be an "
                    "address of this machine at which the others reach it"
                ) from error
        with self._lock:
            self._group, self._joined = group, True

    def leave(self) -> None:
        """Closes what this rank has with the others, after the sum under way. Any number of times."""
        with self._lock:
            self._group = None

    def sum(self, part: Tensor) -> Tensor:
        """Of what all ranks have, in the dtype of `part` [rows, hidden]. Before the first epoch, where this
        rank measures what computing takes, its own part. Raises Unavailable where a rank is gone, or too
        slow."""
        with self._lock:
            group, alone = self._group, not self._joined
        if alone or self.rank.ranks == 1:
            return part
        if group is None:
            raise Unavailable("this rank belongs to no epoch")
        held = self._device.fetch(part.contiguous())
        options = torch.distributed.AllreduceOptions()
        options.timeout = timedelta(seconds=SUM_S)
        try:
            group.allreduce([held], options).wait()
        except RuntimeError as error:
            self.leave()
            reason = _first_line(error)
            raise Unavailable(f"a rank of this stage is gone, or stands still: {reason}") from error
        finally:
            del group  # an error's traceback would keep its threads and sockets
        return self._device.upload(held)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
