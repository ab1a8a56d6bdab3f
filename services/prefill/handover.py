"""Where a job's finished layers go: to the holders that will attend over them, and to the kvstore."""

from __future__ import annotations

from kvcommons.engine.keeper import BlockKeeper, KeptRun
from services.prefill.job import Job, writes
from services.prefill.push import Delivery, Pusher


class Handover:
    """Blocks are indices in the sequence; nothing here waits."""

    def __init__(self, pusher: Pusher, keeper: BlockKeeper) -> None:
        self._pusher = pusher
        self._keeper = keeper

    def push(self, job: Job, delivery: Delivery, layer: int, blocks: range) -> None:
        """One layer of these blocks, to the targets that want them."""
        first = max(blocks.start, job.push_from_block)
        for write in writes(job.targets, first, blocks.stop - first):
            self._pusher.write(delivery, layer, write, job.blocks[write.first : write.first + write.count])

    def save(self, job: Job, layer: int, blocks: range) -> None:
        """One layer of these full blocks, to the store, as far as it is not known to have them. Nothing of a
        job without reuse: it leaves nothing behind that a later one could profit from."""
        request = job.request
        first = max(blocks.start, job.save_from)
        if request.no_reuse or not request.store_data or first >= blocks.stop:
            return
        run = KeptRun(
            store=request.store_data,
            tenant=request.tenant,
            parent=job.ids[first - 1] if first else b"",
            first_index=first,
            ids=tuple(job.ids[first : blocks.stop]),
            blocks=tuple(job.blocks[first : blocks.stop]),
        )
        self._keeper.save(run, layer)

    def make_room(self) -> bool:
        """Whether blocks came free that only waited to be saved."""
        return self._keeper.make_room()
