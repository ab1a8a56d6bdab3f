"""What a block store stands on: a disk, a table for its index, threads. The simulation has its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from services.kvstore.ballast import Ballast
from services.kvstore.database import Settling
from services.kvstore.disk import Disk, LocalDisk
from services.kvstore.index import open_index


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    disk: Disk
    index: Settling
    executor: Callable[[int, str], Executor]  # threads, name
    ballast: Ballast | None = None
    reserve_bytes: int = 0  # that KV leaves free on the disk, the ballast included

    @staticmethod
    def local(slabs: Path, index: Path, ballast: Ballast | None = None, reserve_bytes: int = 0) -> Medium:
        """This machine. Raises StoreUnavailable, OSError."""
        return Medium(
            disk=LocalDisk(slabs),
            index=open_index(index, ballast),
            ballast=ballast,
            reserve_bytes=reserve_bytes,
            executor=lambda threads, name: ThreadPoolExecutor(threads, thread_name_prefix=name),
        )
