"""What a store knows of the queue already, so that each hint has only what is new. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvcommons.pb import kvstore_pb2 as pb
from services.router.admission.queue import Prefix

# Blocks of the jobs that are new in a hint: half a megabyte. The jobs behind them come with the next hints.
NEW_BLOCKS_MAX = 16_384
# A store that accepted fewer jobs than a hint had gets so many more than that the next time.
_MORE_JOBS = 16


class WaitingJob(NamedTuple):
    """`number` is used once."""

    number: int
    prefix: Prefix
    starts_in_s: float


class StoreHints:
    """The hints for one store."""

    def __init__(self) -> None:
        self._known: set[int] = set()  # jobs whose blocks it has been sent
        self._jobs_max: int | None = None

    def request(self, router: str, jobs: Iterable[WaitingJob], ttl_s: float) -> pb.HintRequest:
        """The next hint for `jobs`, soonest first: blocks only of the jobs that are new to the store."""
        request = pb.HintRequest(router=router, ttl_ms=int(ttl_s * 1000))
        new_blocks = 0
        for job in jobs:
            if self._jobs_max is not None and len(request.uses) >= self._jobs_max:
                break
            if job.number not in self._known:
                new_blocks += len(job.prefix.block_ids)
                if new_blocks > NEW_BLOCKS_MAX and request.uses:
                    break
                request.uses.add(model=job.prefix.model, block_ids=job.prefix.block_ids)
            else:
                request.uses.add()
            use = request.uses[-1]
            use.job, use.starts_in_ms = job.number, int(job.starts_in_s * 1000)
        return request

    def answered(self, request: pb.HintRequest, reply: pb.HintReply) -> None:
        unknown = set(reply.unknown_jobs)
        forgotten = sum(not use.block_ids and use.job in unknown for use in request.uses)
        self._known = {use.job for use in request.uses} - unknown
        bounded = reply.accepted_uses + forgotten < len(request.uses)
        self._jobs_max = reply.accepted_uses + _MORE_JOBS if bounded else None

    def failed(self) -> None:
        """The call failed: the store may have the hint or not."""
        self._known.clear()
