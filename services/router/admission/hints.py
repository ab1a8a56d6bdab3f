"""What a store knows of the queue already, so that each hint has only what is new. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvcommons.pb import kvstore_pb2 as pb
from services.router.admission.queue import Prefix

# Blocks of the requests that are new in a hint: half a megabyte. The requests behind them come with the next
# hints.
NEW_BLOCKS_MAX = 16_384
# A store that accepted fewer requests than a hint had gets so many more than that the next time.
_MORE_REQUESTS = 16


class WaitingRequest(NamedTuple):
    """`number` is used once."""

    number: int
    prefix: Prefix
    starts_in_s: float


class StoreHints:
    """The hints for one store."""

    def __init__(self) -> None:
        self._known: set[int] = set()  # requests whose blocks it has been sent
        self._requests_max: int | None = None

    def next(self, router: str, requests: Iterable[WaitingRequest], ttl_s: float) -> pb.HintRequest:
        """The next hint for `requests`, soonest first: blocks only of the requests that are new to the
        store."""
        hint = pb.HintRequest(router=router, ttl_ms=int(ttl_s * 1000))
        new_blocks = 0
        for request in requests:
            if self._requests_max is not None and len(hint.uses) >= self._requests_max:
                break
            if request.number not in self._known:
                new_blocks += len(request.prefix.block_ids)
                if new_blocks > NEW_BLOCKS_MAX and hint.uses:
                    break
                hint.uses.add(model=request.prefix.model, block_ids=request.prefix.block_ids)
            else:
                hint.uses.add()
            use = hint.uses[-1]
            use.job, use.starts_in_ms = request.number, int(request.starts_in_s * 1000)
        return hint

    def answered(self, hint: pb.HintRequest, reply: pb.HintReply) -> None:
        unknown = set(reply.unknown_jobs)
        forgotten = sum(not use.block_ids and use.job in unknown for use in hint.uses)
        self._known = {use.job for use in hint.uses} - unknown
        bounded = reply.accepted_uses + forgotten < len(hint.uses)
        self._requests_max = reply.accepted_uses + _MORE_REQUESTS if bounded else None

    def failed(self) -> None:
        """The call failed: the store may have the hint or not."""
        self._known.clear()
