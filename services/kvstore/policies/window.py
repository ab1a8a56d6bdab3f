"""How far ahead in the queue it is worth looking: AttentionStore's windows (§3.3). No I/O, no clock."""

from __future__ import annotations

_MEAN_JOBS = 1024  # the mean follows the workload at the pace of so many


class Windows:
    """Lengths in jobs, from capacities and the mean size of what a job wants, S_kv, kept current.

    Capacities and sizes are in one unit, blocks or bytes.
    """

    def __init__(self, *, dram: float, disk: float, smallest: float = 1.0) -> None:
        self._dram = dram
        self._disk = disk
        self._smallest = smallest  # of one block: no job that matters wants less
        self._jobs = 0
        self._mean = smallest

    def served(self, size: float) -> None:
        """A job wanted so much."""
        self._jobs = min(self._jobs + 1, _MEAN_JOBS)
        self._mean += (size - self._mean) / self._jobs

    @property
    def session_size(self) -> float:
        """S_kv."""
        return max(self._smallest, self._mean)

    @property
    def fetch(self) -> int:
        """Jobs at the queue's head whose blocks should be in DRAM: L_pw = C_mem / S_kv (§3.3.1)."""
        return max(1, int(self._dram / self.session_size))

    @property
    def eviction(self) -> int:
        """Jobs at its head whose blocks are exempt: L_ev = (C_mem + C_disk) / S_kv (§3.3.2)."""
        return max(1, int((self._dram + self._disk) / self.session_size))
