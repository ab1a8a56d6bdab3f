"""The time, passed in wherever something depends on it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kvcommons.files import write_whole

log = logging.getLogger(__name__)

JUMP_MS = 2_000  # between two looks; less is a correction, and followed at once
BELIEVED_AFTER_S = 3_600.0  # so long a clock has to stay where it jumped to
DOWN_MS_MAX = 600_000  # since the time was last kept: more than that a start does not take for granted
KEPT_EVERY_S = 10.0


class Clock(Protocol):
    def monotonic_s(self) -> float:
        """For spans of time."""

    def now_ms(self) -> int:
        """For what is stored: milliseconds since 1970."""


class SystemClock:
    def monotonic_s(self) -> float:
        return time.monotonic()

    def now_ms(self) -> int:
        return int(time.time() * 1000)


class SteadyClock:
    """The system's clock without its jumps, which would end sessions before their time, or hold a session for
    a turn that is long over.

    Between looks it goes on as the monotonic clock does. Where the system's clock jumps, forward or back, it
    is believed once it has stayed there for an hour: until then somebody may set it right, and nothing
    happened. Over restarts the time is kept in a file; a start that finds another time than that, by more
    than a restart takes, begins with the file's. Thread-safe."""

    def __init__(
        self,
        kept: Path,
        *,
        wall_ms: Callable[[], int] | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kept = kept
        self._wall_ms = wall_ms or SystemClock().now_ms
        self.monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._offset_ms = self._look()  # from the monotonic clock to the time that is believed
        self._seen_ms = self._offset_ms  # likewise, to the system's, at the last look
        self._jumped_s = monotonic_s()
        before_ms = _read(kept)
        if before_ms is not None and not -JUMP_MS <= self._wall_ms() - before_ms <= DOWN_MS_MAX:
            self._offset_ms = before_ms - int(monotonic_s() * 1000)
            self._say("the clock is not where it was left")

    def now_ms(self) -> int:
        with self._lock:
            seen_ms = self._look()
            if abs(seen_ms - self._seen_ms) > JUMP_MS:
                self._jumped_s = self.monotonic_s()
                jumped = abs(seen_ms - self._offset_ms) > JUMP_MS
                self._seen_ms = seen_ms
                if jumped:
                    self._say("the clock jumped")
            self._seen_ms = seen_ms
            if abs(seen_ms - self._offset_ms) <= JUMP_MS:
                self._offset_ms = seen_ms
            elif self.monotonic_s() - self._jumped_s >= BELIEVED_AFTER_S:
                self._offset_ms = seen_ms
                log.warning("the clock has stayed where it jumped to: it is believed")
            return self._offset_ms + int(self.monotonic_s() * 1000)

    def keep(self) -> None:
        """For the next start. Raises OSError."""
        write_whole(self._kept, f"{self.now_ms()}\n".encode())

    def _look(self) -> int:
        return self._wall_ms() - int(self.monotonic_s() * 1000)

    def _say(self, what: str) -> None:
        log.warning(
            "%s: sessions and leases go by the time before for an hour, unless it is set right",
            what,
            extra={"seconds": round((self._seen_ms - self._offset_ms) / 1000)},
        )


def _read(path: Path) -> int | None:
    """None where nothing was kept, or nothing that can be read."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
