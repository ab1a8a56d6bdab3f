"""Clocks that jump: sessions stay, nobody waits for a turn that is over; a clock that stays is believed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcommons.errors import SessionNotFound, TurnInProgress
from services.kvstore.clock import BELIEVED_AFTER_S, SteadyClock
from services.kvstore.session import TurnBegin
from services.kvstore.sessions import Sessions, open_sessions

YEARS_MS = 10 * 365 * 86_400_000
NOW_MS = 1_750_000_000_000
TTL_S = 3_600


class Machine:
    """Its two clocks; `sets` is what an administrator does."""

    def __init__(self) -> None:
        self.monotonic_s = 1_000.0
        self.wall_ms = NOW_MS

    def passes(self, seconds: float) -> None:
        self.monotonic_s += seconds
        self.wall_ms += round(seconds * 1000)

    def sets(self, by_ms: int) -> None:
        self.wall_ms += by_ms

    def clock(self, folder: Path) -> SteadyClock:
        return SteadyClock(
            folder / "clock", wall_ms=lambda: self.wall_ms, monotonic_s=lambda: self.monotonic_s
        )


@pytest.fixture
def machine() -> Machine:
    return Machine()


class Store:
    def __init__(self, folder: Path, machine: Machine) -> None:
        self.clock = machine.clock(folder)
        self.sessions = Sessions(open_sessions(folder / "sessions"), default_ttl_s=0, clock=self.clock)

    def begin(self, turn_id: str) -> None:
        self.sessions.begin("t", "s", TurnBegin(turn_id=turn_id, owner=turn_id, lease_ms=15_000))


@pytest.fixture
def store(tmp_path: Path, machine: Machine) -> Iterator[Store]:
    store = Store(tmp_path, machine)
    yield store
    store.sessions.close()


JUMPS_MS = [sign * jump for jump in (YEARS_MS, 2 * TTL_S * 1000, 20_000) for sign in (1, -1)]


@pytest.mark.parametrize("jump_ms", JUMPS_MS)
def test_a_jump_deletes_nothing_and_blocks_nobody(store: Store, machine: Machine, jump_ms: int) -> None:
    store.sessions.create("t", "kept", TTL_S)
    store.begin("first")
    machine.sets(jump_ms)
    for _ in range(10):
        machine.passes(1)
        store.sessions.sweep()
    assert store.sessions.get("t", "kept").ttl_s == TTL_S
    with pytest.raises(TurnInProgress):  # it is under way, and is not taken for one that is over
        store.begin("second")
    machine.passes(6)  # nobody renewed it
    store.begin("second")
    machine.sets(-jump_ms)  # set right
    machine.passes(TTL_S - 17)
    store.sessions.sweep()
    assert store.sessions.get("t", "kept").ttl_s == TTL_S
    machine.passes(2)
    assert store.sessions.sweep() == 1  # at its own time
    with pytest.raises(SessionNotFound):
        store.sessions.get("t", "kept")


@pytest.mark.parametrize("jump_ms", [YEARS_MS, -YEARS_MS])
def test_a_clock_that_stays_where_it_jumped_is_believed_and_blocks_nobody(
    store: Store, machine: Machine, jump_ms: int
) -> None:
    store.begin("before")
    machine.sets(jump_ms)
    store.clock.now_ms()
    machine.passes(BELIEVED_AFTER_S - 5)
    assert abs(store.clock.now_ms() + jump_ms - machine.wall_ms) < 10
    store.begin("late")  # under the time before
    machine.passes(6)
    assert abs(store.clock.now_ms() - machine.wall_ms) < 10
    if jump_ms < 0:
        store.begin("after")  # a lease that ends in ten years is none
    else:
        machine.passes(15)
        store.begin("after")


@pytest.mark.parametrize("jump_ms", [YEARS_MS, -YEARS_MS, 2 * TTL_S * 1000])
def test_a_clock_that_jumps_between_two_lives_deletes_nothing(
    tmp_path: Path, machine: Machine, jump_ms: int
) -> None:
    store = Store(tmp_path, machine)
    store.sessions.create("t", "kept", TTL_S)
    store.begin("first")
    store.clock.keep()
    store.sessions.close()
    machine.passes(10)
    machine.sets(jump_ms)
    machine.monotonic_s = 5.0  # the machine was started again
    store = Store(tmp_path, machine)
    store.sessions.sweep()
    assert store.sessions.get("t", "kept").ttl_s == TTL_S
    machine.passes(16)
    store.begin("second")
    store.sessions.close()


def test_small_corrections_are_followed_and_a_damaged_file_is_none(
    tmp_path: Path, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "clock").write_bytes(b"\xff\x00")
    clock = machine.clock(tmp_path)
    for _ in range(100):
        machine.sets(500)
        machine.passes(1)
        assert abs(clock.now_ms() - machine.wall_ms) < 10
    assert not caplog.records
    clock.keep()
    machine.passes(60)  # a restart
    assert abs(machine.clock(tmp_path).now_ms() - machine.wall_ms) < 10
