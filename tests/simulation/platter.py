"""A disk that tears writes at sectors, loses what was not synced, flips bits, swaps slots, fills up."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

from services.kvstore.tier import PAGE_BYTES
from tests.simulation.machine import Killed, Machine

SECTOR_BYTES = 512


class Content:
    """The bytes of a file: as it reads now, as it is on the medium, and what is in between."""

    def __init__(self, data: bytes) -> None:
        self.current = bytearray(data)
        self.durable = bytearray(data)
        self.unsynced: list[tuple[int, bytes]] = []
        self.orphaned: list[tuple[int, bytes]] = []  # a sync of them failed: no later one covers them
        self.allocated = {0}  # pages with room behind them

    def put(self, offset: int, data: bytes) -> None:
        self.current[offset : offset + len(data)] = data
        self.unsynced.append((offset, data))
        # Pages that are dirty again belong to the next sync.
        self.orphaned = [write for write in self.orphaned if not _overlap(write, (offset, data))]

    def lose_power(self, machine: Machine) -> None:
        for offset, data in sorted([*self.orphaned, *self.unsynced], key=lambda write: write[0]):
            luck = machine.dice.choice((0.0, 0.5, 1.0))
            for start in range(0, len(data), SECTOR_BYTES):
                if machine.strikes(luck):
                    end = min(start + SECTOR_BYTES, len(data))
                    self.durable[offset + start : offset + end] = data[start:end]
        self.unsynced.clear()
        self.orphaned.clear()
        self.current[:] = self.durable


def _overlap(one: tuple[int, bytes], other: tuple[int, bytes]) -> bool:
    return one[0] < other[0] + len(other[1]) and other[0] < one[0] + len(one[1])


class Platter:
    """A folder on such a disk."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.files: dict[str, Content] = {}
        self._deleted: dict[str, Content] = {}
        self.touched: Callable[[str, int, int], None] = lambda name, offset, length: (
            None
        )  # before each change
        self.punches = True

    @property
    def allocated_pages(self) -> int:
        return sum(len(content.allocated) for content in self.files.values())

    def free_bytes(self) -> int:
        """Too much now and then: somebody else writes, too."""
        room = self._machine.room_pages
        if room is None or self._machine.strikes(0.5):
            return 1 << 40
        return (room - self.allocated_pages) * PAGE_BYTES

    def names(self) -> list[str]:
        return sorted(self.files)

    def head(self, name: str, length: int) -> tuple[bytes, int]:
        self._machine.io()
        content = self.files[name].current
        return bytes(content[:length]), len(content)

    def open(self, name: str) -> PlatterFile:
        return PlatterFile(self, self._machine, name)

    def create(self, name: str, head: bytes, size: int) -> PlatterFile:
        if name in self.files:
            raise FileExistsError(errno.EEXIST, name)
        try:
            self._machine.io()
        except Killed:  # it got as far as it got
            if length := self._machine.dice.choice((None, 0, len(head), size)):
                self.files[name] = Content(head.ljust(length, b"\0"))
            raise
        if self._machine.strikes(self._machine.write_errors):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.check_room(1)
        self.files[name] = Content(head.ljust(size, b"\0"))
        self._machine.io()
        return self.open(name)

    def remove(self, name: str) -> None:
        self._machine.io()
        if name in self.files:
            self._deleted[name] = self.files.pop(name)

    def check_room(self, pages: int) -> None:
        room = self._machine.room_pages
        if room is not None and self.allocated_pages + pages > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def crash(self, *, power: bool) -> None:
        if power:
            for name, content in self._deleted.items():  # deletions are not synced: the file may be back
                if name not in self.files and self._machine.strikes(0.3):
                    self.files[name] = content
            for content in self.files.values():
                content.lose_power(self._machine)
        self._deleted.clear()

    def flip(self, name: str, offset: int) -> None:
        content = self.files[name]
        for data in (content.current, content.durable):
            data[offset] ^= 1 << self._machine.dice.randrange(8)

    def swap(self, name: str, first: int, second: int, length: int) -> None:
        for data in (self.files[name].current, self.files[name].durable):
            data[first : first + length], data[second : second + length] = (
                data[second : second + length],
                data[first : first + length],
            )


class PlatterFile:
    """An open file on it."""

    def __init__(self, platter: Platter, machine: Machine, name: str) -> None:
        self._platter = platter
        self._machine = machine
        self._name = name
        self._content = platter.files[name]

    def read(self, offset: int, into: Sequence[memoryview]) -> None:
        self._machine.io()
        if self._machine.strikes(self._machine.read_errors):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        for view in into:
            part = self._content.current[offset : offset + len(view)]
            if len(part) < len(view):
                raise OSError(errno.EIO, "the slab file ends before the slot does")
            view[:] = part
            offset += len(view)

    def write(self, offset: int, payload: Sequence[memoryview]) -> None:
        self._platter.touched(self._name, offset, sum(len(view) for view in payload))
        data = b"".join(payload)
        for start in range(0, len(data), PAGE_BYTES):
            page = data[start : start + PAGE_BYTES]
            try:
                self._machine.io()
            except Killed:
                torn = self._machine.dice.randrange(0, PAGE_BYTES, SECTOR_BYTES)
                self._content.put(offset + start, page[:torn])
                raise
            if self._machine.strikes(self._machine.write_errors):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            number = (offset + start) // PAGE_BYTES
            if number not in self._content.allocated:
                self._platter.check_room(1)
                self._content.allocated.add(number)
            self._content.put(offset + start, page)

    def sync(self) -> None:
        self._machine.io()
        content = self._content
        if self._machine.strikes(self._machine.sync_errors):
            content.orphaned += content.unsynced
            content.unsynced.clear()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        for offset, data in content.unsynced:
            content.durable[offset : offset + len(data)] = data
        content.unsynced.clear()
        self._machine.io()

    def punch(self, offset: int, length: int) -> bool:
        self._platter.touched(self._name, offset, length)
        self._machine.io()
        if not self._platter.punches:
            return False
        self._content.put(offset, bytes(length))
        pages = range(offset // PAGE_BYTES, (offset + length) // PAGE_BYTES)
        self._content.allocated.difference_update(pages)
        return True

    def close(self) -> None: ...
