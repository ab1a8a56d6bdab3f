"""A sequence: its tokens, and the runs of blocks, here and on other holders, in which their KV lies. No
I/O."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ParamSpec

from kvcommons.engine.request import Request
from kvcommons.grammar.grammars import Constraint
from kvcommons.holder.head_group import Creditor, HeadGroup
from kvcommons.holder.segments import SegmentRef
from kvcommons.model.sampling import SamplingRow
from kvcommons.pb import common_pb2 as pb
from kvcommons.placement.base import Next, Placement
from kvcommons.placement.fixed import Overflow
from kvcommons.rblock.identity import IdentityChain
from kvcommons.token_ids import token_array

P = ParamSpec("P")


@dataclass(slots=True, kw_only=True)
class LocalRun:
    """Blocks `first_block` … of the sequence, in this holder's memory: `blocks` are their physical
    numbers."""

    first_block: int
    blocks: list[int]  # more may follow; one is only replaced by `replace`
    _table: array[int] = field(default_factory=lambda: array("q"), init=False, repr=False, compare=False)

    @property
    def count(self) -> int:
        return len(self.blocks)

    def table(self) -> array[int]:
        """`blocks` in 64 bits each: what was made of them before is kept, for there may be many."""
        self._table.extend(self.blocks[len(self._table) :])
        return self._table

    def replace(self, index: int, block: int) -> None:
        self.blocks[index] = block
        del self._table[index:]


@dataclass(slots=True, kw_only=True)
class RemoteRun:
    """Blocks `first_block` … of the sequence, borrowed: `ref` names the segment at its `holder`, in which
    they begin at block `segment_block`."""

    first_block: int
    count: int
    holder: Creditor
    ref: SegmentRef
    segment_block: int = 0

    def place(self) -> pb.SegmentPlace:
        """Where prefill writes and attends."""
        place = pb.SegmentPlace(
            data_address=self.holder.data_address,
            handle=self.ref.handle,
            epoch=self.ref.epoch,
            first_block=self.first_block,
            blocks=self.count,
        )
        if isinstance(self.holder, HeadGroup):
            for data_address, ref in self.holder.places(self.ref):
                place.parts.add(data_address=data_address, handle=ref.handle, epoch=ref.epoch)
            place.data_address = place.parts[0].data_address
        return place


Run = LocalRun | RemoteRun


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's tokens and where their KV lies. Runs ascend without gaps; the last one takes appended
    tokens, wherever it lies. Behind a truncation a run lies in the head or after it, never in both.

    The first `computed` of `tokens` have KV. While a prompt is computed these are its leading ones, wherever
    that happens; of a sequence that generates all but the last token, which the next iteration computes.
    """

    key: int
    request: Request
    block_tokens: int
    chain: IdentityChain
    runs: list[Run] = field(default_factory=list)
    tokens: array[int] = field(init=False)
    computed: int = 0
    generated: dict[int, int] = field(init=False)  # token to count, for penalties
    seen: dict[int, None] = field(init=False)  # each token once, for a repetition penalty; else empty
    placement: Placement = field(default_factory=Overflow)
    constraint: Constraint | None = None  # by its grammar, where its tokens are sampled
    refused: bool = False  # nobody lent it its next block: it takes one here, if it can
    published_blocks: int = 0  # leading full blocks that were published, and saved or known to be saved
    saved_blocks: int = 0
    ended: bool = False
    reported_borrowed: dict[str, int] = field(default_factory=dict)  # blocks by their holder's data address

    def __post_init__(self) -> None:
        self.tokens = token_array(self.request.tokens)
        self.generated = dict(Counter(self.tokens[self.request.prompt_tokens :]))
        self.seen = dict.fromkeys(self.tokens) if self.request.sampling.penalises_repetition else {}

    @property
    def prompt_computed(self) -> bool:
        """The KV of all of the request's tokens is there."""
        return self.computed >= len(self.request.tokens)

    @property
    def blocks(self) -> int:
        """Blocks held, here and elsewhere."""
        return self.runs[-1].first_block + self.runs[-1].count if self.runs else 0

    @property
    def full(self) -> bool:
        """Whether the next token's KV has no room."""
        return self.unfilled < 0

    @property
    def unfilled(self) -> int:
        """Tokens behind the last one that it has whose KV its blocks can take."""
        return self.blocks * self.block_tokens - len(self.tokens)

    @property
    def head_blocks(self) -> int:
        """Leading blocks that are met with a shifted query."""
        return self.request.truncated.shifted_head_tokens // self.block_tokens

    def in_head(self, run: Run) -> bool:
        return run.first_block < self.head_blocks

    @property
    def tail(self) -> Run:
        return self.runs[-1]

    def next_block(self) -> Next:
        """Where its next block goes."""
        if self.refused:
            return Next.HERE_FIRST
        tail = self.tail
        return self.placement.next_block(
            blocks=self.blocks, tail_blocks=tail.count, tail_away=isinstance(tail, RemoteRun)
        )

    def local_blocks(self) -> list[int]:
        return [block for run in self.runs if isinstance(run, LocalRun) for block in run.blocks]

    def remote_runs(self) -> list[RemoteRun]:
        return [run for run in self.runs if isinstance(run, RemoteRun)]

    def runs_from(self, block: int) -> list[Run]:
        """Its room from this block on."""
        found: list[Run] = []
        for run in self.runs:
            before = max(0, block - run.first_block)
            if before >= run.count:
                continue
            if isinstance(run, LocalRun):
                found.append(LocalRun(first_block=run.first_block + before, blocks=run.blocks[before:]))
            else:
                found.append(
                    replace(
                        run,
                        first_block=run.first_block + before,
                        count=run.count - before,
                        segment_block=run.segment_block + before,
                    )
                )
        return found

    def news_of_borrowed(self) -> dict[str, int] | None:
        """Borrowed blocks by their holder's data address; None where it has said so before."""
        borrowed: dict[str, int] = {}
        for run in self.runs:
            if isinstance(run, RemoteRun):
                address = run.holder.data_address
                borrowed[address] = borrowed.get(address, 0) + run.count
        if borrowed == self.reported_borrowed:
            return None
        self.reported_borrowed = borrowed
        return borrowed

    def append_run(self, run: Run) -> None:
        """More room at the end; local blocks after a local run lengthen it, and so does a grown remote
        segment."""
        assert run.first_block == self.blocks
        head = self.head_blocks - run.first_block
        if 0 < head < run.count:
            assert isinstance(run, LocalRun), "borrowed blocks are asked for on either side of the head's end"
            self.append_run(LocalRun(first_block=run.first_block, blocks=run.blocks[:head]))
            run = LocalRun(first_block=run.first_block + head, blocks=run.blocks[head:])
        last = self.runs[-1] if self.runs and run.first_block != self.head_blocks else None
        if isinstance(run, LocalRun) and isinstance(last, LocalRun):
            last.blocks.extend(run.blocks)
        elif (
            isinstance(run, RemoteRun)
            and isinstance(last, RemoteRun)
            and run.holder is last.holder
            and run.ref == last.ref
            and run.segment_block == last.segment_block + last.count
        ):
            last.count += run.count
        else:
            self.runs.append(run)

    def replace_leading(self, blocks: Items[int]) -> list[int]:
        """Has these physical blocks in place of as many leading ones, which lie here too: those that it had,
        which are the caller's now. Before anything was computed."""
        had = []
        for index, block in enumerate(blocks):
            run, inside = self.locate(index)
            assert isinstance(run, LocalRun), "blocks that lie here"
            had.append(run.blocks[inside])
            run.replace(inside, block)
        return had

    def movable(self, run: RemoteRun) -> int:
        """Leading blocks of a run that are sealed: full, their tokens' KV complete. The run that takes
        tokens keeps a block, to grow from."""
        if not self.prompt_computed:
            return 0  # prefill still writes to it
        full = min(self.computed // self.block_tokens - run.first_block, run.count)
        return max(0, min(full, run.count - 1) if run is self.tail else full)

    def move(self, run: RemoteRun, moved: Run, ref: SegmentRef) -> bool:
        """The leading blocks of `run` lie in `moved` now; what is left of it is reached by `ref`. False
        where they do not lie there any more."""
        place = next((i for i, one in enumerate(self.runs) if one is run), None)
        if place is None or moved.first_block != run.first_block or moved.count > self.movable(run):
            return False
        left: list[Run] = []
        if moved.count < run.count:
            run.first_block += moved.count
            run.segment_block += moved.count
            run.count -= moved.count
            run.ref = ref
            left = [run]
        after = self.runs[place + 1 :]
        self.runs = self.runs[:place]
        for one in [moved, *left, *after]:
            self.append_run(one)
        return True

    def start(self, first: int) -> str | None:
        """The prompt's KV is complete and `first` follows it; the reason where the sequence ends with
        that."""
        assert len(self.tokens) == len(self.request.tokens), "a sequence starts once"
        return self.append(first)

    def append(self, token: int) -> str | None:
        """A sampled token, after all of those before it were computed; the reason ("stop" or "length") where
        the sequence ends with it."""
        self.computed = len(self.tokens)
        self.tokens.append(token)
        if self.request.sampling.penalises_repetition:
            self.seen[token] = None
        self.generated[token] = self.generated.get(token, 0) + 1
        if token in self.request.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.request.max_position else None

    def sampling_row(self, drafts: Items[int] = ()) -> SamplingRow:
        """For the token that the next iteration samples; behind `drafts`: for the one that follows if they
        are what is sampled before it."""
        request, position = self.request, len(self.tokens) + len(drafts)
        generated: Mapping[int, int] = self.generated
        seen: Collection[int] = self.seen
        if drafts and request.sampling.penalised:
            generated = Counter(self.generated) + Counter(drafts)
        if drafts and request.sampling.penalises_repetition:
            seen = {**self.seen, **dict.fromkeys(drafts)}
        may_end = position >= request.prompt_tokens + request.sampling.min_tokens
        return SamplingRow(
            params=request.sampling,
            position=position,
            generated=generated,
            seen=seen,
            withheld=() if may_end else request.stop_token_ids,
            mask=None if self.constraint is None else partial(self.constraint.mask, self.tokens, drafts),
        )

    def verifiable(self, drafts: Items[int]) -> Items[int]:
        """The leading ones of `drafts` that an iteration can verify: their KV has room in the blocks that are
        there, the sequence does not end before the token behind the last one, and its grammar allows them."""
        left = self.request.max_position - len(self.tokens) - 1
        drafts = drafts[: max(0, min(self.unfilled, left))]
        stop = next((at for at, token in enumerate(drafts) if token in self.request.stop_token_ids), None)
        drafts = drafts[:stop]
        if drafts and self.constraint is not None:
            drafts = drafts[: self.constraint.allowed(self.tokens, drafts)]
        return drafts

    def identities(self) -> Items[bytes]:
        """Identities of the full blocks among the computed tokens."""
        if self.chain.tokens < self.computed:
            self.chain.extend(self.tokens[self.chain.tokens : self.computed])
        ids, full = self.chain.ids, self.computed // self.block_tokens
        return ids if len(ids) == full else ids[:full]

    def newly_full(self) -> range:
        """Indices of blocks whose tokens are all computed and that were not published yet; marks them
        published."""
        first = self.published_blocks
        self.published_blocks = max(first, self.computed // self.block_tokens)
        return range(first, self.published_blocks)

    def on_behalf(self, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Does `work` in the context of the call that asked for the sequence, on whatever thread: spans and
        log lines that come of it are that request's."""
        self.request.origin.copy().run(work, *args, **kwargs)

    def locate(self, block: int) -> tuple[Run, int]:
        """The run that a block lies in, and the block's index in it."""
        for run in self.runs:
            if block < run.first_block + run.count:
                return run, block - run.first_block
        raise IndexError(f"block {block} of a sequence of {self.blocks}")
