"""Drives any policy over random trees of prefixes, and checks at each step what must always hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from benchmarks.replay.hierarchy import Capacity, Hierarchy
from services.kvstore.policies.base import Policy
from services.kvstore.policies.catalogue import CATALOGUE

Run = tuple[int, ...]


def runs_of(choices: list[tuple[int, ...]]) -> list[Run]:
    """Paths in a tree: a block's number is that of the path to it, so that equal blocks have equal pasts."""
    numbers: dict[tuple[int, ...], int] = {}
    return [
        tuple(numbers.setdefault(path[: depth + 1], len(numbers)) for depth in range(len(path)))
        for path in choices
    ]


runs = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=60).map(
    runs_of
)


def maker(name: str) -> Callable[[], Policy[Any]]:
    return CATALOGUE[name].make


def serve_all(hierarchy: Hierarchy[int], jobs: list[Run], look_ahead: int | None, capacity: Capacity) -> int:
    """Leading blocks found, in all. Fails where a tier is too full or the account is wrong."""
    hits, known = 0, 0
    for number, run in enumerate(jobs):
        if look_ahead is not None:
            for job in range(known, min(len(jobs), number + look_ahead + 1)):
                hierarchy.expect(job, jobs[job])
                known = job + 1
        served = hierarchy.serve(number, run, float(number))
        assert served.dram >= 0 <= served.disk
        assert served.dram + served.disk <= len(run)
        assert hierarchy.dram_used <= capacity.dram_blocks - capacity.buffer_blocks
        assert hierarchy.disk_used <= capacity.disk_blocks
        hits += served.dram + served.disk
    return hits
