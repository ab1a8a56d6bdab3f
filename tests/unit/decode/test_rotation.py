"""A group of instances rotates when its first one finds that it pays, all of them or none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.slices import LocalSlices
from kvcommons.errors import InvalidInput, UnsupportedParameter
from kvcommons.holder.budget import AttentionBudget
from kvcommons.pb import data_pb2
from kvcommons.transport.server import DataServer, Exchange, Handler
from services.decode.staggering.lanes import LANES, BatchLane, Mode
from services.decode.staggering.rotation import Rotated, Rotation
from tests.unit.engine.tiny import tiny_core
from tests.waiting import wait_until

LAYERS = 4


class Uncounted:
    def for_peer(self) -> None:
        """Nobody asks."""


@dataclass
class Instance:
    rotation: Rotation
    server: DataServer
    asked: list[str]  # what its peer asked of it, each as it came

    def stop(self) -> None:
        self.rotation.close(5)
        assert self.server.stop()


Start = Callable[..., list[Instance]]


def refuse(request: data_pb2.DataRequest, exchange: Exchange) -> None:
    raise UnsupportedParameter("nothing else is asked for", param="op")


def noting(handler: Handler, asked: list[str]) -> Handler:
    def handle(request: data_pb2.DataRequest, exchange: Exchange) -> None:
        asked.append(request.WhichOneof("op") or "")
        handler(request, exchange)

    return handle


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Instance] = []

    def make(*modes: Mode, identities: tuple[bytes, ...] = ()) -> list[Instance]:
        addresses = [f"unix:{tmp_path}/{number}" for number in range(len(modes))]
        for number, mode in enumerate(modes):
            core = tiny_core(layers=LAYERS, identity=identities[number] if identities else bytes(32))
            rotation = Rotation(mode, addresses, core, AttentionBudget(1.0), Uncounted(), deadline_s=5.0)
            asked: list[str] = []
            handler = noting(rotation.handler(refuse), asked)
            server = DataServer(addresses[number], handler, name=f"decode-{number}")
            rotation.join(addresses[number])
            server.start()
            rotation.start()
            running.append(Instance(rotation, server, asked))
        return running

    yield make
    for one in running:
        one.stop()


def timing(slice_s: float, attend_s: float, **changes: Any) -> IterationTiming:
    """Of one batch at each replica, all of whose parts take so long in a layer."""
    return IterationTiming(
        seconds=LAYERS * (slice_s + attend_s), there_s=LAYERS * attend_s, pool_s=LAYERS * attend_s, **changes
    )


def measure(one: Instance) -> None:
    """Slices of half as many sequences take little less: two batches here would not pay, three for two
    replicas do."""
    for _ in range(5):
        one.rotation.ended(16, 16_000, timing(1e-3, 5e-4), batch=16, alone=True)
        one.rotation.ended(8, 8_000, timing(8e-4, 25e-5), batch=16, alone=True)


def hear(one: Instance, other: Instance) -> None:
    """Until one has taken in what the other has to do now: of two meetings that it begins from now on, the
    first one's answer says so, and has come when it begins the second."""
    before = len(other.asked)
    wait_until(lambda: len(other.asked) >= before + 2 and one.rotation.peers_well() == 1)


def test_the_first_decides_and_the_others_follow_until_it_is_gone(start: Start) -> None:
    first, second = start("auto", "auto")
    wait_until(lambda: first.rotation.peers_well() == second.rotation.peers_well() == 1)
    assert first.rotation.batches(16, 16_000) == second.rotation.batches(16, 16_000) == 1
    assert not first.rotation.rotating  # nothing was measured
    measure(first)
    wait_until(lambda: first.rotation.batches(16, 16_000) == LANES)  # once it has heard of the other's load
    wait_until(lambda: second.rotation.rotating)
    assert second.rotation.batches(16, 16_000) == 1  # its slices go round, its batch is one
    assert (first.rotation.shares, second.rotation.shares) == (2, 1)
    assert isinstance(
        second.rotation.slices(0, LocalSlices(tiny_core(layers=LAYERS).model), unrotated=False), Rotated
    )
    first.stop()
    wait_until(lambda: not second.rotation.rotating)


def test_what_it_does_not_keep_it_takes_back(start: Start) -> None:
    """A trial in which layers take as long as before."""
    first, second = start("auto", "auto")
    wait_until(lambda: first.rotation.peers_well() == 1)
    first.rotation.batches(16, 16_000)
    second.rotation.batches(16, 16_000)
    measure(first)
    wait_until(lambda: first.rotation.batches(16, 16_000) == LANES)
    wait_until(lambda: second.rotation.rotating)
    lane = cast(BatchLane, SimpleNamespace(began_s=None))
    for _ in range(20):
        lane.began_s = time.monotonic() - LAYERS * 5e-3
        first.rotation.took_staggered(16, 16_000, lane)
        first.rotation.batches(16, 16_000)
    assert not first.rotation.rotating
    wait_until(lambda: not second.rotation.rotating)


@pytest.mark.parametrize("left", [0, LANES - 1])
def test_a_trial_ends_where_the_first_has_no_two_batches(start: Start, left: int) -> None:
    """The others have enough for the group; of the first's iterations none would be measured. It is tried
    again once the first has them."""
    first, second = start("auto", "auto")
    wait_until(lambda: first.rotation.peers_well() == 1)
    second.rotation.batches(16, 16_000)
    measure(first)
    wait_until(lambda: first.rotation.batches(16, 16_000) == LANES)
    wait_until(lambda: second.rotation.rotating)
    assert first.rotation.batches(left, left * 1000) == 1
    assert not first.rotation.rotating
    wait_until(lambda: not second.rotation.rotating)
    assert first.rotation.batches(16, 16_000) == LANES
    assert first.rotation.rotating


def test_an_idle_group_decides_nothing_and_goes_on(start: Start) -> None:
    """Whether each had two batches before or one, and whatever of a layer's time did not depend on them."""
    first, _ = start("auto", "auto")
    wait_until(lambda: first.rotation.peers_well() == 1)
    for attend_s in (0.0, 1e-3):
        for _ in range(5):
            first.rotation.ended(16, 16_000, timing(1e-3, attend_s), batch=16, alone=True)
        for sequences in (16, 0, 1, 0, 16):
            batches = first.rotation.batches(sequences, sequences * 1000)
            assert batches == (LANES if sequences == 16 and attend_s else 1)


def test_two_batches_at_each_are_taken_where_they_bring_as_much(start: Start) -> None:
    """Slices of half as many sequences take half as long, attention half as long as slices: three batches
    for two replicas would pay, and are no better than two at each."""
    first, second = start("auto", "auto")
    wait_until(lambda: first.rotation.peers_well() == 1)
    second.rotation.batches(16, 16_000)
    for _ in range(5):
        first.rotation.ended(16, 16_000, timing(1e-3, 5e-4), batch=16, alone=True)
    assert first.rotation.batches(16, 16_000) == LANES
    hear(first, second)
    assert first.rotation.batches(16, 16_000) == LANES
    assert not first.rotation.rotating


def test_activations_that_take_long_are_known_before_it_is_tried(start: Start) -> None:
    first, second = start("auto", "auto")
    wait_until(lambda: first.rotation.peers_well() == 1)
    second.rotation.batches(16, 16_000)
    first.rotation.ended(16, 16_000, timing(1e-3, 5e-4, away=4, moved_s=LAYERS * 2e-3), batch=16, alone=True)
    measure(first)
    hear(first, second)
    assert first.rotation.batches(16, 16_000) == 1
    assert not first.rotation.rotating


def test_on_and_off_are_kept_and_too_few_sequences_stay_one_batch(start: Start) -> None:
    first, second = start("on", "off")
    wait_until(lambda: first.rotation.peers_well() == second.rotation.peers_well() == 1)
    assert first.rotation.batches(LANES, 10) == LANES
    assert first.rotation.batches(LANES - 1, 10) == 1
    assert first.rotation.rotating
    assert not second.rotation.rotating  # it computes slices for the first, and keeps its own


def test_another_model_is_no_peer_of_either(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    first, second = start("on", "on", identities=(bytes(32), bytes(31) + b"x"))

    def found() -> tuple[int, int, int]:
        refused = sum("set up wrongly" in record.getMessage() for record in caplog.records)
        return first.rotation.peers_well(), second.rotation.peers_well(), refused

    wait_until(lambda: any(found()[:2]) or found()[2] == 2, "each has met the other, or was refused")
    assert found() == (0, 0, 2)


def test_a_group_has_each_of_its_instances_once() -> None:
    for own, replicas in (("unix:/c", ("unix:/a", "unix:/b")), ("unix:/a", ("unix:/a", "unix:/a"))):
        rotation = Rotation(
            "on", replicas, tiny_core(layers=LAYERS), AttentionBudget(1.0), Uncounted(), deadline_s=1.0
        )
        with pytest.raises(InvalidInput, match="once"):
            rotation.join(own)


def test_a_group_of_one_is_refused() -> None:
    alone = Rotation(
        "on", ("unix:/a",), tiny_core(layers=LAYERS), AttentionBudget(1.0), Uncounted(), deadline_s=1.0
    )
    with pytest.raises(InvalidInput, match="leave replicas out"):
        alone.join("unix:/a")
