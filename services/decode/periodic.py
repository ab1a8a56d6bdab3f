"""What decode looks at again and again for as long as it serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context

from kvcommons.errors import KVCommonsError

log = logging.getLogger(__name__)


class PeriodicTask:
    """Belongs to the event loop."""

    def __init__(self, name: str, every_s: float, work: Callable[[], Awaitable[None]]) -> None:
        """A round whose `work` raises came to nothing: the next comes all the same."""
        self._name = name
        self._every_s = every_s
        self._work = work
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Does nothing where they are under way."""
        if self._task is None:
            # Not in the context of the request that happens to be first: its trace ends some day.
            self._task = asyncio.get_running_loop().create_task(
                self._run(), name=self._name, context=Context()
            )

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self._work()
            except KVCommonsError as error:
                log.info("%s came to nothing: %s", self._name, error.message)
            except Exception:
                log.exception("%s came to nothing", self._name)
