"""Which slice is computed next, in a simulated pipeline of several batches (Lamina, section 5.1)."""

from __future__ import annotations

from dataclasses import dataclass

from kvcommons.engine.fair_lock import FairQueue
from services.decode.staggering.pipelines import Scheme


def attend_s_wanted(scheme: Scheme, slice_s: float) -> float:
    """What attention of a batch should take in the pool: with it neither the pool nor, under rotation, a
    replica ever waits. t_a = t_m / (n - 1)."""
    return slice_s / max(scheme.batches - 1, 1)


@dataclass(frozen=True, slots=True)
class SliceStart:
    """The batch's slice may run on the replica, now."""

    batch: int
    replica: int


class SliceSchedule:
    """Who computes next on each replica: first come, first served. Where attention takes t_m / (n - 1) that
    is the order of the paper's figure 8, without bubbles under rotation; where times differ nobody waits for
    a batch that is not ready, and batches without sequences simply do not ask."""

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme
        self._slices = [0] * scheme.batches
        self._queues: list[FairQueue[int]] = [FairQueue() for _ in range(scheme.replicas)]

    def replica(self, batch: int) -> int:
        """Of the batch's slice that runs, waits or is next."""
        return self._scheme.replica_of(batch, self._slices[batch])

    def ask(self, batch: int) -> SliceStart | None:
        """The batch is ready for its next slice. None: it waits for `ended` to name it."""
        replica = self.replica(batch)
        return SliceStart(batch, replica) if self._queues[replica].ask(batch) else None

    def ended(self, batch: int) -> SliceStart | None:
        """The batch's slice is computed, its attention begins. The slice that the replica computes next."""
        replica = self.replica(batch)
        self._slices[batch] += 1
        successor = self._queues[replica].ended()
        return None if successor is None else SliceStart(successor, replica)
