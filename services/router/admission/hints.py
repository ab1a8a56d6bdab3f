"""What a store has been told of the queue, so that each hint tells only what is new. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvcommons.pb import kvstore_pb2 as pb
from services.router.admission.queue import Prefix

# Of jobs that a hint tells for the first time: half a megabyte. Those behind them are told with the next
# ones.
NEW_BLOCKS_MAX = 16_384
# A store that took fewer jobs than it was told is told so many more the next time.
_MORE_JOBS = 16


class WaitingJob(NamedTuple):
    """`number` is used once."""

    number: int
    prefix: Prefix
    starts_in_s: float


class StoreHints:
    """Of one store."""

    def __init__(self) -> None:
        self._known: set[int] = set()  # jobs that it was told of with their blocks
        self._jobs_max: int | None = None

    def request(self, router: str, jobs: Iterable[WaitingJob], ttl_s: float) -> pb.HintRequest:
        """All that it has to know of `jobs`, soonest first."""
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
        """Nobody knows what the store has heard."""
        self._known.clear()
