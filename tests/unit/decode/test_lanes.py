"""What an iteration's time is spent on, and when two batches are tried."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import torch

from kvcommons.backend.choice import choose
from kvcommons.engine.iteration_timing import IterationTiming
from services.decode.staggering.lanes import LANES, BatchLane, Lanes, Pipelining


def test_waits_are_attention_then_queueing_then_network() -> None:
    timing = IterationTiming(seconds=1.0, slices_s=0.5, here_s=0.05)
    timing.waited(0.10, computed_s=0.04, queued_s=0.01)
    assert timing.there_s == 0.04
    assert round(timing.waiting_s, 6) == 0.01
    assert round(timing.network_s, 6) == 0.05
    # It computed while slices did: only what is left of it was waited for.
    timing.waited(0.02, computed_s=0.30, queued_s=0.10)
    assert round(timing.there_s, 6) == 0.06
    assert round(timing.pool_s, 6) == 0.34
    assert round(sum(timing.parts.values()), 6) == timing.seconds
    assert round(timing.parts["attention"], 6) == 0.11


def alone(seconds: float, there_s: float, pool_s: float) -> IterationTiming:
    return IterationTiming(seconds=seconds, there_s=there_s, pool_s=pool_s)


def test_off_and_on_are_kept_whatever_is_measured() -> None:
    off, on = Pipelining("off", 4), Pipelining("on", 4)
    for one in (off, on):
        one.ended(64, 64_000, alone(0.2, 0.1, 0.1), batch=64, alone=True)
    assert off.batches(64, 64_000) == 1
    assert on.batches(64, 64_000) == LANES
    assert on.batches(1, 1_000) == 1


def test_by_itself_where_attention_is_much_of_an_iteration_that_elsewhere_is_computed() -> None:
    for there_s, batches in ((0.1, LANES), (0.0, 1)):
        one = Pipelining("auto", 4)
        assert one.batches(64, 64_000) == 1  # nothing is known
        for _ in range(5):
            one.ended(64, 64_000, alone(0.2, there_s, there_s), batch=64, alone=True)
        assert one.batches(64, 64_000) == batches
        assert one.batches(3, 3_000) == 1


def test_one_sequence_is_one_batch_and_gains_nothing() -> None:
    one = Pipelining("auto", 4)
    for _ in range(5):
        one.ended(64, 64_000, alone(0.2, 0.1, 0.1), batch=64, alone=True)
    assert one.batches(64, 64_000) == LANES
    assert one.gain(64, 64_000) > 1
    for sequences in (1, 0):
        assert one.batches(sequences, sequences * 1000) == 1
        assert one.gain(sequences, sequences * 1000) == 1.0


def test_once_nobody_else_has_kv_batches_are_one_again() -> None:
    """Staggered iterations tell nothing of what one batch would take without the pool."""
    one = Pipelining("auto", 4)
    for _ in range(5):
        one.ended(64, 64_000, alone(0.2, 0.1, 0.1), batch=64, alone=True)
    for pool_s in (0.1, 0.0, 0.1, 0.0, 0.0, 0.0):  # of one lane's batch all may be here
        assert one.batches(64, 64_000) == LANES
        one.ended(64, 64_000, alone(0.2, pool_s, pool_s), batch=32, alone=False)
    one.ended(64, 64_000, alone(0.2, 0.0, 0.0), batch=32, alone=False)
    assert one.batches(64, 64_000) == 1
    one.ended(64, 64_000, alone(0.1, 0.0, 0.0), batch=64, alone=True)
    assert one.batches(64, 64_000) == 1
    one.ended(64, 64_000, alone(0.2, 0.1, 0.1), batch=64, alone=True)
    assert one.batches(64, 64_000) == LANES, "it is there again"


def test_what_is_about_a_sequence_under_way_waits_for_it() -> None:
    posted: list[Any] = []
    lanes = Lanes(choose().device, posted.append, lambda lane, tokens: None)
    done: list[str] = []
    lane = lanes.all[1]
    ends = threading.Event()
    flying: Any = SimpleNamespace(run_or_fail=lambda: ends.wait(10))
    lane.launch(flying, [7])
    assert lanes.under_way
    assert lanes.defer(7, lambda: done.append("later"))
    assert not lanes.defer(8, lambda: done.append("never"))
    assert len(lane.deferred) == 1
    assert not done
    lanes.close(0.01)
    assert not lanes.under_way, "what takes longer than closing waits is given up"
    ends.set()
    lanes.close(5.0)


def test_an_iteration_that_fails_ends_too() -> None:
    ended: list[tuple[BatchLane, Any]] = []
    posted: list[Any] = []
    threads = torch.get_num_threads()
    lanes = Lanes(choose().device, posted.append, lambda lane, tokens: ended.append((lane, tokens)))

    failing: Any = SimpleNamespace(run_or_fail=lambda: None)
    lanes.all[0].launch(failing, [])
    until_s = time.monotonic() + 10
    while not posted and time.monotonic() < until_s:
        time.sleep(0.001)
    posted[0]()
    assert ended == [(lanes.all[0], None)]
    assert torch.get_num_threads() == threads
    lanes.close(5.0)
