"""What surrounds an engine that is measured: sequences that end are replaced (continuous batching)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcommons.engine.callbacks import SequenceUpdate
    from kvcommons.engine.sequence import RemoteRun, Sequence


class Replacing(ABC):
    """Callbacks of an engine whose sequences have room for all of their tokens. Its methods are called on the
    engine's thread."""

    def __init__(self) -> None:
        self._free: list[RemoteRun] = []  # of sequences that have ended
        self._tokens = 0  # while they are counted
        self._counting = False
        self._stopping = False

    @abstractmethod
    def _replace(self) -> None:
        """Begins another sequence."""

    def deliver(self, steps: list[SequenceUpdate]) -> None:
        for step in steps:
            if step.error is not None and not self._stopping:
                raise step.error
            if self._counting:
                self._tokens += len(step.tokens)
            if step.reason and not self._stopping:
                self._replace()

    def borrow(self, sequence: Sequence) -> None:
        raise AssertionError("sequences have room for all of their tokens")

    def give_back(self, runs: list[RemoteRun]) -> None:
        self._free += runs

    def save_remote(self, run: RemoteRun, sequence: Sequence, index: int) -> None:
        raise AssertionError("nothing is saved")
