"""Blocks of a sequence that became full: published here, and saved."""

from __future__ import annotations

from kvcommons.engine.callbacks import EngineCallbacks
from kvcommons.engine.core import Core
from kvcommons.engine.keeper import BlockKeeper, KeptRun
from kvcommons.engine.sequence import LocalRun, RemoteRun, Run, Sequence


class BlockPublisher:
    """Belongs to the engine's thread."""

    def __init__(
        self, core: Core, keeper: BlockKeeper, callbacks: EngineCallbacks, *, shares: bool = True
    ) -> None:
        """`shares`: as the engine has it."""
        self._core = core
        self._keeper = keeper
        self._callbacks = callbacks
        self._shares = shares

    def publish_full(self, sequence: Sequence, *, prompt: bool = False) -> None:
        """Those of a prompt were saved by prefill.

        After an iteration all of `tokens` have KV; at the start, all but the first sampled one.
        """
        full = sequence.newly_full()
        if not full or sequence.request.no_reuse:
            return
        ids = sequence.identities()
        for index in full:
            run, inside = sequence.locate(index)
            if isinstance(run, LocalRun):
                self._publish(run, inside, ids[index], share=prompt and self._shares)
            if not prompt and sequence.request.store_data:
                sequence.saved_blocks += 1
                self._save(sequence, run, inside, index)

    def publish_moved(self, sequence: Sequence, moved: LocalRun) -> None:
        """Copies that lie here now."""
        if sequence.request.no_reuse:
            return
        ids = sequence.identities()
        for block, identity in zip(moved.blocks, ids[moved.first_block :], strict=False):
            self._core.allocator.publish(block, identity)

    def _publish(self, run: LocalRun, inside: int, identity: bytes, *, share: bool) -> None:
        """Makes a block findable. Where another block is known under this identity already (n > 1 choices of
        one prompt), that one is shared and this one is free again."""
        allocator, block = self._core.allocator, run.blocks[inside]
        if allocator.publish(block, identity) or not share:
            return
        known = allocator.match([identity])
        if known:
            run.replace(inside, known[0])
            allocator.release([block])

    def _save(self, sequence: Sequence, run: Run, inside: int, index: int) -> None:
        if isinstance(run, RemoteRun):
            sequence.on_behalf(self._callbacks.save_remote, run, sequence, index)
            return
        save_block(self._keeper, sequence, run.blocks[inside], index)


def save_block(keeper: BlockKeeper, sequence: Sequence, block: int, index: int) -> None:
    """Full block `index` of the sequence, which lies here in `block`, goes to its store, all layers that are
    here."""
    request, ids = sequence.request, sequence.identities()
    kept = KeptRun(
        store=request.store_data,
        tenant=request.tenant,
        parent=ids[index - 1] if index else b"",
        first_index=index,
        ids=(ids[index],),
        blocks=(block,),
    )
    sequence.on_behalf(keeper.save_all_layers, kept)
