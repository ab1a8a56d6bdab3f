"""Full blocks of borrowed runs, on their way from their holders to a kvstore."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kvcommons.engine.sequence import RemoteRun
from kvcommons.errors import KVCommonsError
from kvcommons.holder.copying import BlockSave
from kvcommons.holder.head_group import Creditor
from kvcommons.holder.segments import SegmentRef

log = logging.getLogger(__name__)

_Place = tuple[Creditor, SegmentRef]


class RemoteSaves:
    """Calls to holders to save blocks, in the background. Belongs to the event loop."""

    def __init__(self, *, timeout_s: float) -> None:
        """`timeout_s` is of one call; the holder then saves by itself."""
        self._timeout_s = timeout_s
        self._pending: dict[_Place, set[asyncio.Task[None]]] = {}

    def begin(self, run: RemoteRun, block: BlockSave) -> None:
        place = (run.holder, run.ref)
        task = asyncio.get_running_loop().create_task(self._save(run, block))
        self._pending.setdefault(place, set()).add(task)
        task.add_done_callback(lambda done: self._ended(place, done))

    async def ended(self, holder: Creditor, refs: Sequence[SegmentRef], wait_s: float) -> None:
        """Waits, for at most `wait_s`, until the calls for these segments have ended."""
        pending = [task for ref in refs for task in self._pending.get((holder, ref), ())]
        if pending:
            await asyncio.wait(pending, timeout=wait_s)

    def _ended(self, place: _Place, task: asyncio.Task[None]) -> None:
        self._pending[place].discard(task)
        if not self._pending[place]:
            del self._pending[place]

    async def _save(self, run: RemoteRun, block: BlockSave) -> None:
        try:
            await run.holder.save(run.ref, block, timeout_s=self._timeout_s)
        except KVCommonsError as error:
            log.warning("a holder did not save a block: %s", error.message)
