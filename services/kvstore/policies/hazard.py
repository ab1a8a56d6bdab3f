"""How likely a block is to be used again, learned from the jobs that come by.

Blocks are divided into classes by a small number. For each class the curve holds, by age, how many blocks
were used again and how long blocks were at risk of it; their quotient is the hazard of reuse. From it
follows the *hit density* of a block: hits to be had for each unit of time that it takes up room, at the
best moment to stop waiting for it (the Gittins index of the block; hit density as in Beckmann, Chen and
Cidon, LHD, NSDI 2018).

Time is counted in jobs. No I/O, no clock.
"""

from __future__ import annotations

import math

EPOCH_JOBS = 8  # ages are kept to this precision
_GROWTH = 1.2  # each bin of ages is longer than the one before by this
_OLDEST_EPOCHS = 2048  # blocks that wait for longer are all of one age
_HALVE_EPOCHS = 2048  # what was learned counts half after so long, so that the curve follows the workload
_REFERENCE = 4.0  # reuses' worth of belief that a class is like all others
_UNSEEN = 1e-6  # reuses that are taken for granted in each bin of ages: next to none
_SHAPE = 80.0  # reuses' worth of belief, for each bin, in the shape of the curve of all classes


def _edges() -> list[int]:
    edges = [0]
    while edges[-1] < _OLDEST_EPOCHS:
        edges.append(max(edges[-1] + 1, int(edges[-1] * _GROWTH)))
    return edges


class _Kind:
    """What is known of one class. Lists are by bin of age."""

    __slots__ = ("at_risk", "cohorts", "reuses", "waiting")

    def __init__(self, bins: int) -> None:
        self.cohorts: dict[int, int] = {}  # epoch of the last use -> blocks that wait for the next
        self.waiting = [0] * bins  # the same blocks
        self.reuses = [0.0] * bins
        self.at_risk = [0.0] * bins  # block-epochs


class ReuseCurve:
    """Reuse by class and age. Ages and times are epochs of EPOCH_JOBS jobs."""

    def __init__(self) -> None:
        self._edges = _edges()
        self.bins = len(self._edges) - 1
        self._widths = [b - a for a, b in zip(self._edges, self._edges[1:], strict=False)]
        self._bin = [b for b, width in enumerate(self._widths) for _ in range(width)]
        self._kinds: dict[int, _Kind] = {}

    def bin(self, age: int) -> int:
        """The bin of an age."""
        return self._bin[age] if age < len(self._bin) else self.bins - 1

    def entered(self, kind: int, epoch: int, blocks: int) -> None:
        """Blocks of this class begin to wait for their next use."""
        of = self._kinds.get(kind)
        if of is None:
            of = self._kinds[kind] = _Kind(self.bins)
        of.cohorts[epoch] = of.cohorts.get(epoch, 0) + blocks
        of.waiting[0] += blocks

    def reused(self, kind: int, epoch: int, now: int, blocks: int) -> None:
        """Their next use came."""
        if self.dropped(kind, epoch, now, blocks):
            self._kinds[kind].reuses[self.bin(now - epoch)] += blocks

    def dropped(self, kind: int, epoch: int, now: int, blocks: int) -> bool:
        """Nobody watches any more whether it comes. False: the blocks were given up long ago."""
        of = self._kinds[kind]
        if epoch not in of.cohorts:
            return False
        of.cohorts[epoch] -= blocks
        of.waiting[self.bin(now - epoch)] -= blocks
        return True

    def advance(self, now: int) -> None:
        """The next epoch begins: who waited in the one before was at risk in it."""
        for of in self._kinds.values():
            for age_bin, blocks in enumerate(of.waiting):
                if blocks:
                    of.at_risk[age_bin] += blocks
            for age_bin, end in enumerate(self._edges[1:-1]):
                blocks = of.cohorts.get(now - end, 0)
                if blocks:
                    of.waiting[age_bin] -= blocks
                    of.waiting[age_bin + 1] += blocks
            of.waiting[-1] -= of.cohorts.pop(now - self._edges[-1], 0)
        if now % _HALVE_EPOCHS == 0:
            for of in self._kinds.values():
                of.reuses = [value / 2 for value in of.reuses]
                of.at_risk = [value / 2 for value in of.at_risk]

    def densities(self, dead_jobs: int) -> dict[int, list[float]]:
        """By class and bin of age: hits per job that a block stays which the next `dead_jobs` do not want.

        Those jobs are in the queue: they cost room and bring nothing. Ages are those of the waits so far.
        """
        dead = dead_jobs / EPOCH_JOBS
        return {kind: self._gittins(hazard, dead) for kind, hazard in self._hazards().items()}

    def _hazards(self) -> dict[int, list[float]]:
        """Reuses per block and epoch. Where a class has few samples, it leans on the curve of all."""
        kinds = self._kinds.values()
        reuses = [sum(column) for column in zip(*(of.reuses for of in kinds), strict=True)]
        at_risk = [sum(column) for column in zip(*(of.at_risk for of in kinds), strict=True)]
        pooled = [(r + _UNSEEN) / (t + 1.0) for r, t in zip(reuses, at_risk, strict=True)]
        hazards = {}
        for kind, of in self._kinds.items():
            expected = sum(hazard * time for hazard, time in zip(pooled, of.at_risk, strict=True))
            level = (sum(of.reuses) + _REFERENCE) / (expected + _REFERENCE)
            hazards[kind] = [
                (r + _SHAPE) / (t + _SHAPE / (hazard * level))
                for r, t, hazard in zip(of.reuses, of.at_risk, pooled, strict=True)
            ]
        return hazards

    def _gittins(self, hazard: list[float], dead: float) -> list[float]:
        steps = []
        for h, width in zip(hazard, self._widths, strict=True):
            reuse = -math.expm1(-h * width)
            steps.append((reuse, width * (1 - reuse / 2)))
        densities = []
        for start in range(self.bins):
            alive, hits, time, best = 1.0, 0.0, dead, 0.0
            for reuse, duration in steps[start:]:
                hits += alive * reuse
                time += alive * duration
                alive *= 1 - reuse
                if hits > best * time:
                    best = hits / time
            densities.append(best / EPOCH_JOBS)
        return densities
