"""The host's cores, as one of its engines has them: it takes turns with others, and says how long the threads
that compute stay awake."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvcommons.backend.interface import Device
from kvcommons.engine.core_lock import CoreLock
from kvcommons.engine.iteration import Iteration
from kvcommons.engine.token_rows import TokenRows
from kvcommons.holder.budget import AttentionBudget

# Threads that compute wait awake for an iteration that follows soon: between two of them with all KV here are
# 1 to 3 ms. They wait for a share of what they compute, so that those of a small model do not mostly wait.
AWAKE_S_MAX, AWAKE_SHARE = 0.005, 0.25
# Else from one operation of a layer to the next: attention of other processes may need the core.
DOZING_S = 0.00006


class Cores:
    """Belongs to the engine's thread."""

    def __init__(self, device: Device, budget: AttentionBudget, lock: CoreLock | None) -> None:
        """`lock`: where other engines of the host share them. `budget`: of the attention that this process
        computes for others, whoever has the cores."""
        self._device = device
        self._budget = budget
        self._lock = lock
        self._awake_s: float | None = None  # within `computing`
        self._lately_s = 0.0  # that the last iteration took whose successor follows soon

    @contextmanager
    def iterating(self, iteration: Iteration) -> Iterator[None]:
        """An iteration, which comes before other engines' chunks where sequences generate in it."""
        generates = any(isinstance(group, TokenRows) for group in iteration.groups)
        follows_soon = all(isinstance(one, TokenRows) and one.batch.plain for one in iteration.groups)
        share_s = AWAKE_SHARE * self._lately_s if follows_soon else 0.0
        with self.computing(urgent=generates, awake_s=min(max(share_s, DOZING_S), AWAKE_S_MAX)):
            yield
        if follows_soon:
            self._lately_s = iteration.timing.own_s

    @contextmanager
    def computing(self, *, urgent: bool, awake_s: float = DOZING_S) -> Iterator[None]:
        """Threads wait so long for the next operation, and for none at the end while another engine wants the
        cores. What is computed within an iteration has the cores with it."""
        lock = self._lock if self._lock is not None and not self._lock.held else None
        if lock is not None:
            with self._budget.waiting():  # who has the cores may need attention computed here
                lock.acquire(urgent=urgent)
        outer_s, self._awake_s = self._awake_s, awake_s
        try:
            self._device.keep_awake(awake_s)
            yield
        finally:
            self._awake_s = outer_s
            try:
                if outer_s is not None:
                    self._device.keep_awake(outer_s)
                elif lock is not None and lock.wanted:
                    self._device.keep_awake(0.0)
            finally:
                if lock is not None:
                    lock.release()

    def give_way(self) -> None:
        """In the middle of a chunk: whoever waits for them has them first."""
        if self._lock is not None and self._lock.held and self._lock.wanted:
            with self._budget.waiting(), self._lock.released():
                pass
