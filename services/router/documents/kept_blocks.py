"""A document's blocks in the kvstore, which are spared from eviction while it is on its way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from kvcommons.errors import KVCommonsError
from services.router.admission.hints import StoreHints, WaitingRequest
from services.router.admission.queue import Prefix
from services.router.fleet.fleet import Fleet

log = logging.getLogger(__name__)

_HINT_S = 2.0
_HINT_TTL_S = 10.0
_CALL_S = 2.0
# Chat's next requests come first where DRAM is short: a document that is computed has its KV on the device.
_STARTS_IN_S = 60.0
_RUN_BLOCKS = 4096  # of one expected use, whose blocks are sent once


class KeptBlocks:
    """Tells the store, again and again, that blocks will be used: eviction policies take others while there
    are any."""

    def __init__(self, name: str, model: bytes, ids: Sequence[bytes]) -> None:
        """`name`: by which the store knows this document among routers. `ids`: of all its blocks."""
        self._name = name
        self._model = model
        self._ids = ids
        self._runs: list[WaitingRequest] = []
        self._blocks = 0
        self._number = time.time_ns()  # a document that another router goes on with uses no number again
        self._hints = StoreHints()
        self._grown = asyncio.Event()

    def grow(self, blocks: int) -> None:
        """So many leading blocks are computed."""
        while self._blocks < blocks:
            end = min(self._blocks + _RUN_BLOCKS, blocks)
            prefix = Prefix(model=self._model, block_ids=self._ids[self._blocks : end])
            self._number += 1
            self._runs.append(WaitingRequest(self._number, prefix, _STARTS_IN_S))
            self._blocks = end
            self._grown.set()

    async def run(self, fleet: Fleet) -> None:
        """Until it is cancelled; what the store remembers runs out then. `fleet`: seen from the blocks'
        home."""
        store_id = ""
        while True:
            self._grown.clear()
            store = fleet.store()
            if store is not None and self._runs:
                if store.id != store_id:
                    self._hints, store_id = StoreHints(), store.id
                hint = self._hints.next(self._name, self._runs, _HINT_TTL_S)
                try:
                    self._hints.answered(hint, await fleet.blocks(store).Hint(hint, timeout=_CALL_S))
                except KVCommonsError as error:
                    self._hints.failed()
                    log.debug("the store was not told of a document's blocks: %s", error)
            try:
                async with asyncio.timeout(_HINT_S):
                    await self._grown.wait()
            except TimeoutError:
                pass
