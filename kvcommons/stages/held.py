"""What a stage behind the first has of sequences: prompts that are handed over, and sequences that
generate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvcommons.engine.block_publisher import save_block
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.engine.prompt import NOT_HERE, Prompt
from kvcommons.engine.sequence import LocalRun, RemoteRun, Run, Sequence
from kvcommons.errors import InvalidInput, KVCommonsError, StaleEpoch
from kvcommons.pb import data_pb2 as pb
from kvcommons.prefill.push import Delivery
from kvcommons.prefill.targets import TargetTable
from kvcommons.rblock.allocator import BlockAllocator


class Held(Protocol):
    """A sequence that the first stage has begun."""

    @property
    def prompt(self) -> Prompt | None:
        """Its prompt, where that is computed here."""

    ended: bool  # by the first stage; it is reported once nothing of it is under way here

    @property
    def ends(self) -> bool:
        """Whether blocks of it wait only for what is under way."""

    def left(self, allocator: BlockAllocator) -> list[int]:
        """First positions of its chunks whose blocks are others' now; each is said once."""

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

    def __init__(self, prompt: Prompt, delivery: Delivery, targets: TargetTable) -> None:
        self.prompt = prompt
        self.delivery = delivery
        self.targets = targets
        self.ended = False

    @property
    def ends(self) -> bool:
        return self.ended

    def left(self, allocator: BlockAllocator) -> list[int]:
        return []

    @property
    def blocks(self) -> list[int]:
        return self.prompt.blocks

    @property
    def remote_runs(self) -> list[RemoteRun]:
        return []

    def abandon(self, reason: KVCommonsError) -> None:
        self.delivery.abandon(reason)


class HeldSpread(HeldPrompt):
    """One whose blocks are here only while a chunk of them is computed, and on their way out (a window)."""

    def __init__(self, prompt: Prompt, delivery: Delivery, targets: TargetTable) -> None:
        super().__init__(prompt, delivery, targets)
        self._open: tuple[int, list[int]] | None = None
        self._closed: dict[int, list[int]] = {}  # by first position, oldest first
        prompt.blocks = [NOT_HERE] * prompt.total_blocks

    @property
    def ends(self) -> bool:
        return self.ended or bool(self._closed)

    @property
    def blocks(self) -> list[int]:
        windows = [*self._closed.values(), self._open[1] if self._open is not None else []]
        return [block for blocks in windows for block in blocks]

    def open_window(self, first: int, blocks: list[int]) -> None:
        """Of the chunk from this position on. Raises InvalidInput for one that lies elsewhere."""
        prompt, at = self.prompt, first // self.prompt.block_tokens
        if self._open is not None or not blocks or at + len(blocks) > len(prompt.blocks):
            raise InvalidInput(f"{len(blocks)} blocks from token {first} on are no chunk of a spread prompt")
        self._open = first, blocks
        prompt.blocks[at : at + len(blocks)] = blocks

    def close_window(self) -> None:
        """The chunk is computed, or never will be."""
        if self._open is not None:
            first, blocks = self._open
            self._closed[first], self._open = blocks, None
            at = first // self.prompt.block_tokens
            self.prompt.blocks[at : at + len(blocks)] = [NOT_HERE] * len(blocks)

    def left(self, allocator: BlockAllocator) -> list[int]:
        found = [first for first, blocks in self._closed.items() if allocator.held_once(blocks)]
        for first in found:
            del self._closed[first]
        return found


class HeldSequence:
    """One that generates here. Its prompt's KV comes from elsewhere, or is computed in the same blocks."""

    def __init__(self, sequence: Sequence, runs: Iterable[Run], *, shared_blocks: int) -> None:
        """In `runs`; its leading `shared_blocks` are others', too."""
        self.sequence = sequence
        self.prompt: Prompt | None = None
        self.ended = False
        self._shared_blocks = shared_blocks
        self.grow(runs)

    @property
    def ends(self) -> bool:
        return self.ended

    def left(self, allocator: BlockAllocator) -> list[int]:
        return []

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
        if self.prompt is not None or first < self._shared_blocks or not blocks or len(blocks) < count:
            raise InvalidInput(
                f"blocks {first} … {first + count - 1} are not this sequence's to be written: it has "
                f"{self._shared_blocks} … {len(self.blocks) - 1}"
            )
        return blocks

    def advance(self, span: pb.StageSpan) -> None:
        """Its next token is computed now. Raises InvalidInput for another one."""
        sequence = self.sequence
        if not sequence.prompt_computed:  # now it is here, and saved, by whomever
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
