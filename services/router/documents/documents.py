"""The documents of a router: those on their way, and for a while those that have ended."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

from kvcommons.errors import Overloaded

if TYPE_CHECKING:
    from services.router.documents.document import Document

_ENDED_MAX = 256  # remembered, for those who come later to ask

Key = tuple[str, str]
"""Tenant and session."""


class Documents:
    """Belongs to the event loop."""

    def __init__(self, running_max: int) -> None:
        self._running_max = running_max
        self._running: dict[Key, tuple[Document, asyncio.Task[None]]] = {}
        self._ended: OrderedDict[Key, Document] = OrderedDict()

    def __len__(self) -> int:
        """Those on their way."""
        return len(self._running)

    @property
    def full(self) -> bool:
        return len(self._running) >= self._running_max

    def check_room(self) -> None:
        """Raises Overloaded where enough are on their way."""
        if self.full:
            raise Overloaded(
                f"{len(self._running)} documents are on their way here, its most: come back later",
                retry_after_ms=30_000,
            )

    def begin(self, key: Key, document: Document) -> None:
        """Runs it in the background."""
        task = asyncio.create_task(document.run(), name=f"document of {key[1]}")
        self._running[key] = document, task
        task.add_done_callback(lambda _: self._end(key, document))

    def running(self, key: Key) -> Document | None:
        """The one on its way into a session here."""
        running = self._running.get(key)
        return running[0] if running is not None else None

    def ended(self, key: Key) -> Document | None:
        """The one of a session that ended here last."""
        return self._ended.get(key)

    async def cancel(self, key: Key) -> None:
        """Ends the one on its way into a session, if there is one."""
        running = self._running.get(key)
        if running is not None:
            running[1].cancel()
            await asyncio.wait((running[1],))

    async def close(self) -> None:
        """Leaves all to other routers, or to this one's successor."""
        for document, task in self._running.values():
            document.leave()
            task.cancel()
        await asyncio.gather(*(task for _, task in self._running.values()), return_exceptions=True)

    def _end(self, key: Key, document: Document) -> None:
        del self._running[key]
        self._ended.pop(key, None)
        self._ended[key] = document
        if len(self._ended) > _ENDED_MAX:
            self._ended.popitem(last=False)
