"""How long OpenMP's threads stay awake for their next operation.

GCC's OpenMP, which torch brings, lets them for 9 ms. Nobody else gets the core in that time: the attention
that other processes of the host compute between two slices of the model goes to the cores that are left.
"""

from __future__ import annotations

from collections.abc import MutableMapping

# 0.06 ms: from one operation of a slice to the next, but not for an answer.
_SPINS = "2000"
_CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def bound_waits(environ: MutableMapping[str, str]) -> None:
    """Before torch is loaded, which is when it is read. What the environment says already stays."""
    if not any(name in environ for name in _CHOSEN):
        environ["GOMP_SPINCOUNT"] = _SPINS
