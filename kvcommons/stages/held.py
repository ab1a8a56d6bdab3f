"""What a stage behind the first has of sequences: prompts that are handed over, and sequences that
generate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvcommons.engine.block_publisher import save_block
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.engine.prompt import Prompt
from kvcommons.engine.sequence import LocalRun, RemoteRun, Run, Sequence
from kvcommons.errors import InvalidInput, KVCommonsError, StaleEpoch
from kvcommons.pb import data_pb2 as pb
from kvcommons.prefill.push import Delivery


class Held(Protocol):
    """A sequence that the first stage has begun."""

    ended: bool  # by the first stage; it is reported once nothing of it is under way here

    @property
    def blocks(self) -> list[int]:
        """Physical ones."""

    @property
    def remote_runs(self) -> list[RemoteRun]:
        """Its blocks that lie on other holders."""

    def abandon(self, reason: KVCommonsError) -> None:
        """Nobody wants any more what is under way of it."""


class HeldPrompt:
    """One that is computed here, and whose KV goes elsewhere."""

    def __init__(self, prompt: Prompt, delivery: Delivery) -> None:
        self.prompt = prompt
        self.delivery = delivery
        self.ended = False

    @property
    def blocks(self) -> list[int]:
        return self.prompt.blocks

    @property
    def remote_runs(self) -> list[RemoteRun]:
        return []

    def abandon(self, reason: KVCommonsError) -> None:
        self.delivery.abandon(reason)


class HeldSequence:
    """One that generates here, and whose prompt's KV comes from elsewhere."""

    def __init__(self, sequence: Sequence, runs: Iterable[Run], *, shared_blocks: int) -> None:
        """In `runs`; its leading `shared_blocks` are others', too."""
        self.sequence = sequence
        self.ended = False
        self._shared_blocks = shared_blocks
        self.grow(runs)

    @property
    def blocks(self) -> list[int]:
        return self.sequence.local_blocks()

    @property
    def remote_runs(self) -> list[RemoteRun]:
        return self.sequence.remote_runs()

    def abandon(self, reason: KVCommonsError) -> None:
        """What is written to it ends by itself."""

    def grow(self, runs: Iterable[Run]) -> None:
        for run in runs:
            self.sequence.append_run(run)

    def writable(self, first: int, count: int) -> list[int]:
        """Those of the blocks that are here, for whoever computed them. Raises InvalidInput, StaleEpoch."""
        if self.ended:
            raise StaleEpoch("the sequence has ended: its blocks are given to others")
        blocks = self.blocks[first : first + count]
        if first < self._shared_blocks or not blocks or len(blocks) < count:
            raise InvalidInput(
                f"blocks {first} … {first + count - 1} are not this sequence's to be written: it has "
                f"{self._shared_blocks} … {len(self.blocks) - 1}"
            )
        return blocks

    def advance(self, span: pb.StageSpan) -> None:
        """Its next token is computed now. Raises InvalidInput for another one."""
        sequence = self.sequence
        if sequence.computed == 0:  # its prompt is here, as prefill or the store had it
            sequence.computed = len(sequence.request.tokens)
            sequence.newly_full()
        if span.first != len(sequence.tokens):
            raise InvalidInput(f"token {span.first} came where {len(sequence.tokens)} was due")
        sequence.append(span.token)
        if sequence.full:
            raise InvalidInput("a sequence was planned to generate beyond its blocks")

    def computed(self, keeper: BlockKeeper) -> None:
        """That token has KV: a block that it fills is saved."""
        sequence = self.sequence
        sequence.computed = len(sequence.tokens)
        full = sequence.newly_full()
        if sequence.request.store_data and not sequence.request.no_reuse:
            for index in full:
                run, inside = sequence.locate(index)
                if isinstance(run, LocalRun):  # what lies elsewhere the first stage has saved there
                    save_block(keeper, sequence, run.blocks[inside], index)
