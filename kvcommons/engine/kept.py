"""What was measured on a machine, kept in a file from one start to the next."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvcommons.files import write_whole

log = logging.getLogger(__name__)

T = TypeVar("T")

VERSION = 2  # of the file


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A file with what was learnt of something, and of what: of anything else it is worthless. An empty path:
    nothing is kept."""

    path: Path
    fingerprint: str

    @classmethod
    def of(cls, path: str, *facts: str) -> Kept:
        return cls(path=Path(path), fingerprint=hashlib.blake2b("\n".join(facts).encode()).hexdigest())

    @staticmethod
    def learnt_in(path: Path) -> Any:
        """Of whatever facts. Raises OSError; ValueError, KeyError or TypeError for no such file, or one of
        another version."""
        kept = json.loads(path.read_bytes())
        if kept["version"] != VERSION:
            raise ValueError(f"it has version {kept['version']}, and {VERSION} is read")
        return kept["learnt"]

    def read(self, parse: Callable[[Any], T]) -> T | None:
        """None where there is none, or none of these facts."""
        if self.path == Path():
            return None
        try:
            kept = json.loads(self.path.read_bytes())
            if kept["version"] != VERSION or kept["fingerprint"] != self.fingerprint:
                return None
            return parse(kept["learnt"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("what iterations take is measured anew, for %s: %s", self.path, error)
            return None

    def write(self, learnt: Any) -> None:
        """A disk that refuses costs a measurement at the next start, nothing else."""
        if self.path == Path():
            return
        kept = {"version": VERSION, "fingerprint": self.fingerprint, "learnt": learnt}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(kept).encode())
        except OSError as error:
            log.warning("what iterations take is not kept in %s: %s", self.path, error)
