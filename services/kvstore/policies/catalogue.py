"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from kvcommons.errors import InvalidInput
from services.kvstore.policies.arc import Arc
from services.kvstore.policies.base import Policy
from services.kvstore.policies.hit_density import HitDensity
from services.kvstore.policies.look_ahead import LookAhead
from services.kvstore.policies.recency import Fifo, Lru, SegmentedLru
from services.kvstore.policies.s3_fifo import S3Fifo

AnyPolicy = Policy[Any]

DEFAULT = "scheduler-aware"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEntry:
    """A policy that can be chosen: what makes one for a tier, and what it does with the queue."""

    make: Callable[[], AnyPolicy]
    looks_ahead: bool = False  # it uses the queue, and blocks of the next jobs are fetched from disk for it
    paper_window: bool = False  # it looks no further than AttentionStore's eviction window


def _ahead(make: Callable[[], AnyPolicy], *, paper_window: bool = False) -> PolicyEntry:
    return PolicyEntry(make=lambda: LookAhead(make()), looks_ahead=True, paper_window=paper_window)


CATALOGUE: dict[str, PolicyEntry] = {
    "scheduler-aware": PolicyEntry(make=HitDensity[Hashable], looks_ahead=True),
    "attention-store": _ahead(Lru, paper_window=True),
    "lru": PolicyEntry(make=Lru),
    "fifo": PolicyEntry(make=Fifo),
    "slru": PolicyEntry(make=SegmentedLru),
    "s3-fifo": PolicyEntry(make=S3Fifo),
    "arc": PolicyEntry(make=Arc),
    "hit-density": PolicyEntry(make=HitDensity),
    "lru+queue": _ahead(Lru),
    "slru+queue": _ahead(SegmentedLru),
    "s3-fifo+queue": _ahead(S3Fifo),
    "arc+queue": _ahead(Arc),
}


def policy_entry(name: str) -> PolicyEntry:
    """The policy of that name. Raises InvalidInput for an unknown one."""
    if name not in CATALOGUE:
        raise InvalidInput(f"policy {name!r} is not one of {', '.join(CATALOGUE)}", param="policy")
    return CATALOGUE[name]
