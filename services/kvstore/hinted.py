"""Jobs whose blocks routers have sent once, so that later hints need only name them. Pure: the clock is an
argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore.hints import ROUTERS_MAX, TTL_S_MAX
from services.kvstore.incoming import check_run


class Hinted(NamedTuple):
    """A job that waits at a router, `starts_in_s` from now. `job` is the router's number of it, 0 for
    none."""

    model: bytes
    block_ids: Sequence[bytes]
    starts_in_s: float
    job: int = 0


@dataclass(slots=True, kw_only=True)
class _Router:
    until_s: float
    jobs: dict[int, tuple[bytes, Sequence[bytes]]] = field(default_factory=dict)


class HintedJobs:
    """What is known of the jobs that each router named last."""

    def __init__(self) -> None:
        self._routers: dict[str, _Router] = {}

    def complete(self, request: pb.HintRequest, now_s: float) -> tuple[list[Hinted], list[int]]:
        """The uses of a hint with their blocks, and the jobs whose blocks are not known. Raises InvalidInput
        for a run that names a block twice."""
        self._routers = {name: one for name, one in self._routers.items() if one.until_s > now_s}
        named: tuple[bytes, Sequence[bytes]]
        known = self._routers[request.router].jobs if request.router in self._routers else {}
        uses: list[Hinted] = []
        unknown: list[int] = []
        for use in request.uses:
            if use.block_ids or not use.job:
                named = use.model, list(use.block_ids)
                check_run(named[1])
            elif use.job in known:
                named = known[use.job]
            else:
                unknown.append(use.job)
                continue
            uses.append(Hinted(*named, use.starts_in_ms / 1000, use.job))
        return uses, unknown

    def keep(self, request: pb.HintRequest, uses: Sequence[Hinted], now_s: float) -> None:
        """Remembers these of the hint's jobs, and no other of its router."""
        self._routers.pop(request.router, None)
        jobs = {use.job: (use.model, use.block_ids) for use in uses if use.job}
        if jobs and len(self._routers) < ROUTERS_MAX:
            ttl_s = min(request.ttl_ms / 1000, TTL_S_MAX)
            self._routers[request.router] = _Router(until_s=now_s + ttl_s, jobs=jobs)
