"""Ranks of a stage on real connections: what they sum up, and what becomes of them when one is gone."""

from __future__ import annotations

import gc
import importlib.util
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcommons.backend.choice import choose
from kvcommons.errors import InvalidInput, KVCommonsError, Unavailable
from kvcommons.model.tensor_rank import TensorRank
from kvcommons.pb import data_pb2 as pb
from kvcommons.rpc.dialer import Dialer
from kvcommons.security.credentials import Credentials
from kvcommons.security.token import SharedToken
from kvcommons.stages.ranks import RankGroup
from kvcommons.stages.sums import AT_ONCE_BYTES
from kvcommons.transport.addresses import connect
from kvcommons.transport.client import DataClient, receive_reply
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.server import DataServer, Exchange
from tests.machine import scaled

WITHOUT_UCX = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="needs the extra ucx")


class Ranks:
    """Of one stage, in this process, each with a data plane of its own."""

    def __init__(self, ranks: int, address: Callable[[int], str], credentials: Credentials) -> None:
        device, dialer = choose("cpu").device, Dialer(credentials=credentials)
        self.groups = [RankGroup(TensorRank(number=n, ranks=ranks), device, dialer) for n in range(ranks)]
        self.servers = [
            DataServer(address(number), self._answering(group), name="stage", credentials=credentials)
            for number, group in enumerate(self.groups)
        ]
        for server in self.servers:
            server.start()

    @staticmethod
    def _answering(group: RankGroup) -> Callable[[pb.DataRequest, Exchange], None]:
        return lambda request, exchange: group.welcome(request.join_ranks, exchange)

    def join(self, epoch: int) -> None:
        addresses = [server.address for server in self.servers]
        self.all(lambda group: group.join(epoch, addresses[group.rank.number + 1 :]))

    def leave(self, epoch: int) -> None:
        for group in self.groups:
            group.leave(epoch)

    def sums(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        made: dict[int, torch.Tensor] = {}

        def add(group: RankGroup) -> None:
            made[group.rank.number] = group.sum(parts[group.rank.number].clone())

        self.all(add)
        return [made[number] for number in range(len(parts))]

    def all(self, call: Callable[[RankGroup], None]) -> None:
        """At the same time. Raises what the first that failed did."""
        failures: list[BaseException] = []

        def attempt(group: RankGroup) -> None:
            try:
                call(group)
            except KVCommonsError as error:
                failures.append(error)

        threads = [threading.Thread(target=attempt, args=(group,)) for group in self.groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(scaled(30))
            assert not thread.is_alive()
        if failures:
            raise failures[0]

    def close(self) -> None:
        for server in self.servers:
            server.stop()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A socket's path is short."""
    with tempfile.TemporaryDirectory(prefix="kvc-") as name:
        yield Path(name)


@pytest.fixture
def made(request: pytest.FixtureRequest, folder: Path) -> Iterator[Ranks]:
    ranks, scheme = request.param
    credentials = Credentials()
    if scheme == "token":
        scheme = "tcp"
        credentials = Credentials(token=SharedToken(b"sixteen bytes of it"))
    at = {"tcp": "tcp:127.0.0.1:0", "ucx": "ucx:127.0.0.1:0"}
    group = Ranks(ranks, lambda number: at.get(scheme) or f"{scheme}:{folder}/{number}", credentials)
    try:
        yield group
    finally:
        group.close()


@pytest.mark.parametrize(
    "made",
    [(2, "unix"), (3, "shm"), (4, "tcp"), (2, "token"), pytest.param((2, "ucx"), marks=WITHOUT_UCX)],
    indirect=True,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_have_the_same_sum_whatever_its_size(made: Ranks, dtype: torch.dtype) -> None:
    """Added in the order of the ranks, at each of them."""
    made.join(1)
    generator = torch.Generator().manual_seed(1)
    at_once = AT_ONCE_BYTES // dtype.itemsize // 64
    for rows in (1, at_once, at_once + 1, 8 * at_once + 3, 40 * at_once):
        parts = [torch.randn((rows, 64), generator=generator).to(dtype) for _ in made.groups]
        expected = parts[0].clone()
        for part in parts[1:]:
            expected += part
        assert all(one.equal(expected) for one in made.sums(parts))
    made.leave(1)


@pytest.mark.parametrize("made", [(3, "unix")], indirect=True)
def test_a_rank_that_leaves_wakes_the_others_and_nothing_stays_open(
    made: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcommons.stages.ranks.SUM_S", 1000.0)  # nobody waits until a sum's time is over
    part = torch.full((3, 4), 1.5, dtype=torch.bfloat16)
    assert made.groups[0].sum(part.clone()).equal(part)  # alone, before the first epoch
    before = sockets()
    for epoch in (1, 2, 5):
        made.join(epoch)
        assert all(one.equal(part * 3) for one in made.sums([part] * 3))
        failures: list[KVCommonsError] = []
        waiting = threading.Thread(target=caught, args=(lambda: made.groups[0].sum(part.clone()), failures))
        waiting.start()
        time.sleep(0.02)  # until it waits; where it has not begun yet, it fails all the same
        made.groups[2].leave(epoch - 1)  # of one that is over: nothing to do
        assert waiting.is_alive()
        made.groups[2].leave(epoch)
        made.groups[1].leave(epoch)
        waiting.join(scaled(20))
        assert not waiting.is_alive()
        assert [type(one) for one in failures] == [Unavailable]
        for group in made.groups:
            with pytest.raises(Unavailable, match="belongs to no epoch"):
                group.sum(part)
        made.leave(epoch)
    assert sockets() == before


@pytest.mark.parametrize("made", [(2, "unix")], indirect=True)
@pytest.mark.parametrize("rows", [1, 40_000], ids=["sent at once", "sent when the other one reads"])
def test_one_that_stands_still_ends_a_sum_in_its_time(
    made: Ranks, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcommons.stages.ranks.SUM_S", 0.2)
    made.join(1)
    with pytest.raises(Unavailable, match="stands still: waited"):
        made.groups[0].sum(torch.ones((rows, 64)))
    made.leave(1)


@pytest.mark.parametrize("made", [(2, "unix")], indirect=True)
def test_what_is_another_sum_is_refused(made: Ranks) -> None:
    made.join(1)
    with pytest.raises(Unavailable, match=r"sums up \d+ bytes where \d+ are due|went away|closed"):
        made.sums([torch.ones((1, 8)), torch.ones((1, 4))])
    made.leave(1)


@pytest.mark.parametrize("made", [(2, "unix")], indirect=True)
def test_ranks_that_do_not_come_are_waited_for_so_long(made: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcommons.stages.ranks.JOIN_S", 0.2)
    before = sockets()
    with pytest.raises(Unavailable, match="did not meet: rank 0 did not come"):
        made.groups[1].join(3, [])
    with pytest.raises(Unavailable, match="did not meet: cannot connect"):
        made.groups[0].join(3, ["unix:/nowhere/at/all"])
    made.leave(3)
    gc.collect()
    assert sockets() == before


@pytest.mark.parametrize("made", [(3, "unix")], indirect=True)
def test_who_joins_an_epoch_that_ends_gives_up_at_once(made: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for a rank that calls, or for the answer of one that is called and stands still."""
    monkeypatch.setattr("kvcommons.stages.ranks.JOIN_S", 1000.0)
    before = sockets()
    silent = socket.create_server(("127.0.0.1", 0))
    above = [f"tcp:127.0.0.1:{silent.getsockname()[1]}"]
    for epoch, (number, addresses) in enumerate([(2, []), (1, above)], start=3):
        group, failures = made.groups[number], list[KVCommonsError]()

        def join(group: RankGroup = group, epoch: int = epoch, above: list[str] = addresses) -> None:
            group.join(epoch, above)

        joining = threading.Thread(target=caught, args=(join, failures))
        joining.start()
        time.sleep(0.05)  # until it waits; where it has not begun yet, it gives up all the same
        group.leave(epoch)
        joining.join(scaled(20))
        assert not joining.is_alive()
        assert [type(one) for one in failures] == [Unavailable]
    silent.close()
    assert sockets() == before


@pytest.mark.parametrize("made", [(2, "unix")], indirect=True)
def test_who_calls_late_or_has_no_business_is_told(made: Ranks) -> None:
    made.join(5)
    deadline = Deadline.after(scaled(10))
    for wrong, why in (
        (pb.JoinRanks(epoch=4, rank=0), "put together anew"),
        (pb.JoinRanks(epoch=6, rank=1), "each calls those above it"),
    ):
        client = DataClient(made.servers[1].address)
        with pytest.raises((InvalidInput, KVCommonsError), match=why):
            client.call(pb.DataRequest(join_ranks=wrong), deadline=deadline)
        client.close()
    part = torch.ones((1, 8))
    assert all(one.equal(part * 2) for one in made.sums([part, part]))
    # One that calls again has restarted: its former connection is closed.
    first, second = (connect(made.servers[1].address, deadline) for _ in range(2))
    for connection in (first, second):
        request = pb.DataRequest(deadline_ms=1000, join_ranks=pb.JoinRanks(epoch=7, rank=0))
        connection.send(request.SerializeToString(), (), deadline)
        receive_reply(connection, deadline)
    assert first.wait_readable(deadline)
    assert not second.wait_readable(Deadline.after(0))
    for connection in (first, second):
        connection.close()
    made.leave(7)
    made.leave(5)


@pytest.mark.parametrize("epochs", [(7, 7), (7, 8)])
def test_of_two_calls_the_later_one_counts_in_whatever_order_they_are_kept(epochs: tuple[int, int]) -> None:
    """Each is kept on a thread of its own, once it was answered."""
    group = RankGroup(TensorRank(number=1, ranks=2), choose("cpu").device)
    closed: list[str] = []
    first, second = (exchange_of() for _ in epochs)
    for epoch, exchange in zip(epochs, (first, second), strict=True):
        group.welcome(pb.JoinRanks(epoch=epoch, rank=0), exchange)
    second.take(SimpleNamespace(close=lambda: closed.append("second")))
    first.take(SimpleNamespace(close=lambda: closed.append("first")))
    assert closed == ["first"]
    group.leave(epochs[1])
    assert closed == ["first", "second"]


def exchange_of() -> Any:
    """Of a call whose answer nobody reads."""
    return SimpleNamespace(reply=lambda message: None)


def caught(call: Callable[[], object], failures: list[KVCommonsError]) -> None:
    try:
        call()
    except KVCommonsError as error:
        failures.append(error)


def sockets() -> int:
    """That this process has open; servers close theirs on threads of their own."""
    until = Deadline.after(scaled(5))
    counts: list[int] = []
    while len(counts) < 3 or (len(set(counts[-3:])) > 1 and not until.passed()):
        links = [_target(entry) for entry in Path("/proc/self/fd").iterdir()]
        counts.append(sum(link.startswith("socket:") for link in links))
        time.sleep(0.02)
    return counts[-1]


def _target(entry: Path) -> str:
    try:
        return os.readlink(entry)
    except OSError:
        return ""
