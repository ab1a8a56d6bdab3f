"""What happens to blocks, written at the moment at which it happens: a log for programs, which says
afterwards whether every block had one owner at any time (docs/commons.md has the events)."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from kvcommons.errors import InvalidInput

# (event, its facts). Called under locks: it never blocks and raises nothing.
Observe = Callable[..., None]


def unobserved(event: str, **facts: object) -> None:
    """Nobody wants to know."""


class EventFile:
    """A line of JSON for each event, written at once: what a process has written outlives kill -9. Clocks of
    one machine's processes agree, so that their files can be merged by `at_ns`."""

    def __init__(self, folder: str, instance_id: str) -> None:
        """Raises InvalidInput where `folder` cannot be written to."""
        path = Path(folder) / f"{instance_id}.jsonl"
        self._instance = instance_id
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise InvalidInput(
                f"event_log = {folder!r} cannot be written to: {error.strerror}", param="event_log"
            ) from error

    def __call__(self, event: str, **facts: object) -> None:
        line = {"at_ns": time.monotonic_ns(), "instance": self._instance, "event": event, **facts}
        with contextlib.suppress(OSError):  # a full disk costs lines, never the service
            os.write(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")
