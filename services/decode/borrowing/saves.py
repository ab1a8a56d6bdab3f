"""Full blocks of borrowed runs, on their way from their holders to a kvstore."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvcommons.engine.sequence import RemoteRun
from kvcommons.errors import KVCommonsError
from kvcommons.holder.creditor import Creditor
from kvcommons.holder.segments import SegmentRef

log = logging.getLogger(__name__)

_Place = tuple[Creditor, SegmentRef]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSave:
    """A full block of a sequence, for a kvstore: the arguments of Creditor.save."""

    store: str
    tenant: str
    parent: bytes
    block_id: bytes
    first_block: int  # within the run
    first_index: int  # within the sequence


class Saves:
    """Asked of holders, in the background. Belongs to the event loop."""

    def __init__(self, *, timeout_s: float) -> None:
        """Of one question; the holder then saves by itself."""
        self._timeout_s = timeout_s
        self._asking: dict[_Place, set[asyncio.Task[None]]] = {}

    def begin(self, run: RemoteRun, block: BlockSave) -> None:
        place = (run.holder, run.ref)
        task = asyncio.get_running_loop().create_task(self._save(run, block))
        self._asking.setdefault(place, set()).add(task)
        task.add_done_callback(lambda done: self._ended(place, done))

    async def ended(self, holder: Creditor, refs: Sequence[SegmentRef], wait_s: float) -> None:
        """Once the holder has heard of all saves of these segments, or so long has passed."""
        asking = [task for ref in refs for task in self._asking.get((holder, ref), ())]
        if asking:
            await asyncio.wait(asking, timeout=wait_s)

    def _ended(self, place: _Place, task: asyncio.Task[None]) -> None:
        self._asking[place].discard(task)
        if not self._asking[place]:
            del self._asking[place]

    async def _save(self, run: RemoteRun, block: BlockSave) -> None:
        try:
            await run.holder.save(
                run.ref,
                block.store,
                [block.block_id],
                tenant=block.tenant,
                parent=block.parent,
                first_block=block.first_block,
                first_index=block.first_index,
                timeout_s=self._timeout_s,
            )
        except KVCommonsError as error:
            log.warning("a holder did not save a block: %s", error.message)
