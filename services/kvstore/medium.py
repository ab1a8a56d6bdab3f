"""What a block store stands on: a disk, a table for its index, threads. The simulation has its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from services.kvstore.ballast import DiskReserve
from services.kvstore.database import RecoverableTable
from services.kvstore.disk import Disk, LocalDisk
from services.kvstore.index import open_index


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    disk: Disk
    index: RecoverableTable
    executor: Callable[[int, str], Executor]  # threads, name
    reserve: DiskReserve = field(default_factory=DiskReserve)

    @staticmethod
    def local(slabs: Path, index: Path, reserve: DiskReserve | None = None) -> Medium:
        """This machine. Raises StoreUnavailable, OSError."""
        reserve = reserve or DiskReserve()
        return Medium(
            disk=LocalDisk(slabs),
            index=open_index(index, reserve.ballast),
            reserve=reserve,
            executor=lambda threads, name: ThreadPoolExecutor(threads, thread_name_prefix=name),
        )
