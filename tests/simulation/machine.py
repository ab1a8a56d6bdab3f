"""A machine that fails on purpose: clock, disk, tables and threads, all driven by one seed.

Everything that the kvstore asks of the outside goes through `Machine.io`, which may kill the process at that
very moment, or let what other threads would do meanwhile happen. What survives is decided as by a real disk:
after kill -9 what was written is there, after a loss of power any sector that was not synced may be the old
one or the new one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Any

from kvcommons.errors import StoreUnavailable
from services.kvstore.database import Put


class Killed(BaseException):
    """The process is gone: nothing in it may go on."""


class Violation(AssertionError):
    """What must never happen has happened."""


def require(condition: object, what: str) -> None:
    if not condition:
        raise Violation(what)


class Machine:
    """Time, faults, and the moment of death."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.time_s = 1_000_000.0
        self.kill_in: int | None = None  # operations until the process dies
        self.meanwhile: Callable[[], None] = lambda: None  # what other threads do during I/O
        self.read_errors = 0.0  # probabilities
        self.write_errors = 0.0
        self.sync_errors = 0.0
        self.table_errors = 0.0
        self.room_pages: int | None = None  # of the disk; None: plenty

    def monotonic_s(self) -> float:
        return self.time_s

    def now_ms(self) -> int:
        return int(self.time_s * 1000)

    def io(self) -> None:
        """An operation begins or ends."""
        if self.kill_in is not None:
            self.kill_in -= 1
            if self.kill_in < 0:
                self.kill_in = None
                raise Killed
        self.meanwhile()

    def strikes(self, probability: float) -> bool:
        return probability > 0 and self.dice.random() < probability

    def heal(self) -> None:
        self.kill_in = None
        self.read_errors = self.write_errors = self.sync_errors = self.table_errors = 0.0
        self.room_pages = None


class Threads(Executor):
    """A pool whose tasks run when the schedule says so, in any order."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self.waiting: list[Callable[[], object]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.waiting.append(lambda: fn(*args, **kwargs))
        return Future()

    def map(self, fn: Callable[..., Any], *iterables: Any, **_: Any) -> Iterator[Any]:
        calls = list(enumerate(zip(*iterables, strict=True)))
        self._dice.shuffle(calls)
        results = {number: fn(*args) for number, args in calls}
        return iter([results[number] for number in sorted(results)])

    def run_one(self) -> bool:
        if not self.waiting:
            return False
        self.waiting.pop(self._dice.randrange(len(self.waiting)))()
        return True

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.waiting.clear()


class Rocks:
    """Stands in for RocksDB: atomic batches in a log that is durable up to the last synced one."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.current: dict[tuple[str, bytes], bytes] = {}
        self.durable: dict[tuple[str, bytes], bytes] = {}
        self.uncertain: set[tuple[str, bytes]] = (
            set()
        )  # keys of batches that failed, and are there all the same
        self._tail: list[list[Put]] = []

    def get(self, family: str, key: bytes) -> bytes | None:
        return self.get_many(family, [key])[0]

    def get_many(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        self._machine.io()
        return [self.current.get((family, key)) for key in keys]

    def items(self, family: str, start: bytes = b"", prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        self._machine.io()
        first = max(start, prefix)
        keys = sorted(key for name, key in self.current if name == family)
        for key in keys:
            if key >= first and key.startswith(prefix) and (family, key) in self.current:
                yield key, self.current[family, key]

    def write(self, puts: Sequence[Put], *, sync: bool = True) -> None:
        batch = list(puts)
        try:
            self._machine.io()
        except Killed:
            if self._machine.strikes(0.5):  # it was in the log already
                self._log(batch)
            raise
        if self._machine.strikes(self._machine.table_errors):
            if self._machine.strikes(0.5):  # opening the database again finds it in the log
                self._log(batch)
                self._sync()
                self.uncertain.update((family, key) for family, key, _ in batch)
            raise StoreUnavailable("writing failed; if the disk is full, make room on it")
        self._log(batch)
        self.uncertain.difference_update((family, key) for family, key, _ in batch)
        if sync:
            self._sync()
        self._machine.io()

    def settle(self) -> None:
        self._machine.io()

    def close(self) -> None: ...

    def crash(self, *, power: bool) -> None:
        """What the next start finds; opening a database makes it durable."""
        if power:
            kept = self._machine.dice.randint(0, len(self._tail))
            del self._tail[kept:]
        self._sync()
        self.current = dict(self.durable)
        self.uncertain.clear()

    def _log(self, batch: list[Put]) -> None:
        _apply(self.current, batch)
        self._tail.append(batch)

    def _sync(self) -> None:
        for batch in self._tail:
            _apply(self.durable, batch)
        self._tail.clear()


def _apply(table: dict[tuple[str, bytes], bytes], batch: list[Put]) -> None:
    for family, key, value in batch:
        if value is None:
            table.pop((family, key), None)
        else:
            table[family, key] = value
