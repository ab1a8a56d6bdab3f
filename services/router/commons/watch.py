"""Takes pictures of the commons for all who watch: one at a time, and the same one for everybody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvcommons.errors import Overloaded

PERIOD_S = 0.5  # as often as ledgers tell of loads
VIEWERS_MAX = 32
_RETRY_AFTER_MS = 5_000


class CommonsWatch:
    """A picture is taken when somebody wants one and the last one is older than `PERIOD_S`: the services are
    asked as often for thirty viewers as for one, and not at all for none."""

    def __init__(
        self,
        take: Callable[[], Awaitable[dict[str, Any]]],
        *,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`take` asks the services, and ends within a bounded time."""
        self._take = take
        self._period_s = period_s
        self._clock = clock
        self._taking = asyncio.Lock()
        self._picture: dict[str, Any] | None = None
        self._due_s = 0.0
        self._viewers = 0
        self._closed = asyncio.Event()

    async def picture(self) -> dict[str, Any]:
        """The newest one. Whoever is cancelled while taking it leaves that to the next one who waits."""
        async with self._taking:
            if self._picture is None or self._clock() >= self._due_s:
                self._picture = await self._take()
                self._due_s = self._clock() + self._period_s
            return self._picture

    @contextmanager
    def viewer(self) -> Iterator[None]:
        """Counts one that stays. Raises Overloaded for one too many."""
        if self._viewers >= VIEWERS_MAX:
            raise Overloaded(
                f"{VIEWERS_MAX} viewers watch the commons here already, and more are not served",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        self._viewers += 1
        try:
            yield
        finally:
            self._viewers -= 1

    async def next_due(self) -> bool:
        """Waits until another picture may be taken; False once nobody is to watch any more."""
        try:
            async with asyncio.timeout(max(0.0, self._due_s - self._clock())):
                await self._closed.wait()
        except TimeoutError:
            pass
        return not self._closed.is_set()

    def close(self) -> None:
        """Ends all viewers' streams: the router stops."""
        self._closed.set()
