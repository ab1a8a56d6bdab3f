"""What an iteration's time went to, as in figure 14 of Lamina."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class IterationTiming:
    """Seconds of the thread that iterates, `seconds` in all. What others compute while it computes itself
    costs it nothing: of overlapped times only what is left of them is here, but for `pool_s`."""

    seconds: float = 0.0
    slices_s: float = 0.0  # the model between two attentions, and sampling
    here_s: float = 0.0  # attention here
    there_s: float = 0.0  # of the time that it waited for holders, what the slowest one computed
    network_s: float = 0.0  # sending the queries, and the rest of that time
    waiting_s: float = 0.0  # for the lock of the model, or in the queue of a holder
    pool_s: float = 0.0  # that the slowest holder computed, waited for or not
    away_s: float = 0.0  # slices that other replicas, or other stages, computed
    between_layers_s: float = 0.0  # what it gave way to between two of its layers
    moved_s: float = 0.0  # activations on their way there and back
    away: int = 0  # those slices
    native_layers: int = 0  # whose creditors were asked on the native path
    stood_in: int = 0  # slices that another replica should have computed

    @property
    def parts(self) -> dict[str, float]:
        """They add up to `seconds`."""
        named = {
            "slices": self.slices_s,
            "slices elsewhere": self.away_s,
            "activations": self.moved_s,
            "attention": self.here_s + self.there_s,
            "network": self.network_s,
            "waiting": self.waiting_s,
        }
        return named | {"rest": max(self.seconds - sum(named.values()), 0.0)}

    @property
    def computed_s(self) -> float:
        """In this process."""
        elsewhere_s = self.there_s + self.network_s + self.waiting_s + self.away_s + self.moved_s
        return max(self.own_s - elsewhere_s, 0.0)

    @property
    def own_s(self) -> float:
        """Without what it gave way to."""
        return self.seconds - self.between_layers_s

    def waited(self, blocked_s: float, *, computed_s: float, queued_s: float) -> None:
        """For holders, of which the slowest computed and had queued so long in the meantime."""
        there_s = min(blocked_s, computed_s)
        waiting_s = min(blocked_s - there_s, queued_s)
        self.pool_s += computed_s
        self.there_s += there_s
        self.waiting_s += waiting_s
        self.network_s += blocked_s - there_s - waiting_s

    def slice_away(self, blocked_s: float, *, computed_s: float, queued_s: float) -> None:
        """Another replica was waited for, and says that it computed and had queued so long."""
        away_s = min(blocked_s, computed_s)
        waiting_s = min(blocked_s - away_s, queued_s)
        self.away += 1
        self.away_s += away_s
        self.waiting_s += waiting_s
        self.moved_s += blocked_s - away_s - waiting_s

    def came_back(self, away_s: float) -> None:
        """From the stages behind this one, which had it for so long."""
        self.seconds += away_s
        self.away_s += away_s

    @contextmanager
    def slice(self, lock: AbstractContextManager[None]) -> Iterator[None]:
        """Of the model. Batches that share one replica of it compute within `lock`."""
        asked_s = time.monotonic()
        with lock:
            began_s = time.monotonic()
            yield
            self.slices_s += time.monotonic() - began_s
        self.waiting_s += began_s - asked_s
