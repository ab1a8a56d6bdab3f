"""Calls to the session store: bounded, tried again while it is away, and StoreUnavailable at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from kvcommons.errors import DeadlineExceeded, Overloaded, StoreUnavailable, Unavailable
from services.router.fleet import Fleet

if TYPE_CHECKING:
    from kvcommons.pb.kvstore_pb2_grpc import SessionsAsyncStub

R = TypeVar("R")

CALL_S = 5.0
_DELAY_S_MIN = 0.05
_DELAY_S_MAX = 0.5


class SessionStore:
    def __init__(self, fleet: Fleet, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._clock = clock

    async def call(
        self,
        make: Callable[[SessionsAsyncStub, float], Awaitable[R]],
        *,
        patience_s: float = 0.0,
        call_s: float = CALL_S,
    ) -> R:
        """`make(stub, timeout_s)` does the call. It is tried again for `patience_s` while the store is away,
        so it has to be idempotent where that is not 0. Errors that the store itself raised pass through.
        """
        deadline_s = self._clock() + patience_s
        delay_s = _DELAY_S_MIN
        while True:
            timeout_s = min(call_s, max(deadline_s - self._clock(), _DELAY_S_MIN)) if patience_s else call_s
            try:
                return await make(self._fleet.sessions(), timeout_s)
            except (Unavailable, DeadlineExceeded, Overloaded) as error:
                if self._clock() + delay_s >= deadline_s:
                    raise _gave_up(error, patience_s) from error
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, _DELAY_S_MAX)


def _gave_up(error: Unavailable | DeadlineExceeded | Overloaded, patience_s: float) -> Exception:
    if isinstance(error, Overloaded):
        return error
    waited = f" for {patience_s:g} s" if patience_s else ""
    return StoreUnavailable(
        f"the session store was out of reach{waited}: {error.message}; try again in some seconds",
        retry_after_ms=error.retry_after_ms or 1000,
    )
