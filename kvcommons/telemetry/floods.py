"""Of lines that repeat without end a log needs a few, and how many there were: whoever sends bad requests,
with a key or without, would fill the disk otherwise."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

LINES_MAX = 50  # of a kind, in each window
WINDOW_S = 10.0
KINDS_MAX = 1_000
LEFT_OUT = "left_out"


class FloodFilter(logging.Filter):
    """Lets `lines_max` lines of a kind through in each window: the first line of a later window says in
    `left_out` how many were not. A kind is what the program wrote, before values are put in. Errors count
    likewise; what is critical, and what somebody debugs, goes through. Thread-safe."""

    def __init__(
        self,
        *,
        lines_max: int = LINES_MAX,
        window_s: float = WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._lines_max = lines_max
        self._window_s = window_s
        self._clock = clock
        self._lock = threading.Lock()
        self._began_s: dict[tuple[str, int, str], float] = {}
        self._lines: dict[tuple[str, int, str], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not logging.INFO <= record.levelno < logging.CRITICAL:
            return True
        kind = (record.name, record.levelno, str(record.msg))
        now_s = self._clock()
        with self._lock:
            began_s = self._began_s.get(kind)
            if began_s is None or now_s - began_s >= self._window_s:
                if len(self._began_s) >= KINDS_MAX:
                    self._began_s.clear()
                    self._lines.clear()
                left_out = self._lines.get(kind, 0) - self._lines_max
                if left_out > 0:
                    setattr(record, LEFT_OUT, left_out)
                self._began_s[kind], self._lines[kind] = now_s, 1
                return True
            self._lines[kind] += 1
            return self._lines[kind] <= self._lines_max
