"""The read buffer of layer-wise pre-loading (AttentionStore, section 3.2.1). Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class LoadRates(Protocol):
    """What is known of loading and computing; 0 until measured."""

    @property
    def load_bytes_per_s(self) -> float: ...

    def load_seconds(self, load_bytes: int) -> float: ...

    def compute_seconds(self, positions: range) -> float: ...


def buffer_bytes(rates: LoadRates, *, history_bytes: int, new: range) -> float:
    """`S_buf = B (T_load L_hist - T_pref L_new)`: what has to be there before a job computes, so that its
    layers never wait for their history. B is the bandwidth of loading, T_load and T_pref are the times that a
    token takes to load and to prefill; both products come from what was measured. `new`: positions. Not below
    0.
    """
    gap_s = rates.load_seconds(history_bytes) - rates.compute_seconds(new)
    return max(0.0, rates.load_bytes_per_s * gap_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBuffer:
    """How many layers of a job's history are loaded before its prompt is computed; the rest begins to load
    with its first chunk.

    Loaded blocks lie in memory that the job holds anyway: `bytes_max` bounds what lies there early, of all
    jobs that wait.
    """

    layers: int
    bytes_max: int
    fixed_layers: int | None = None  # instead of the formula: for comparisons
    whole_first: bool = False  # a job computes when all of its history is there: no pre-loading, likewise

    @property
    def first_use(self) -> int:
        """The layer that has to be there when a job begins to compute."""
        return self.layers - 1 if self.whole_first else 0

    def layers_ahead(self, rates: LoadRates, *, history_bytes: int, new: range, held_bytes: int) -> int:
        """For a history of `history_bytes`, behind which `new` positions are computed, where other jobs'
        buffers hold `held_bytes`."""
        layer_bytes = history_bytes / self.layers
        free = int(max(0, self.bytes_max - held_bytes) // layer_bytes)
        if self.fixed_layers is not None:
            wanted = self.fixed_layers
        elif not rates.load_bytes_per_s:
            wanted = self.layers
        else:
            # One more than the gap: what a turn begins with must never be waited for.
            size = buffer_bytes(rates, history_bytes=history_bytes, new=new)
            wanted = math.ceil(size / layer_bytes) + 1
        return min(wanted, free, self.layers)
