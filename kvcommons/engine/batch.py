"""The tensors of an iteration: rows, their KV here, and their KV elsewhere.

A batch is built when its composition changes (a sequence joins, ends or grows) and then stepped: what differs
from one iteration to the next is a token, a position and a length per row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcommons.backend.interface import Backend, Partial
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.sequence import LocalRun, RemoteRun, Sequence
from kvcommons.grammar.grammars import Constraint
from kvcommons.holder.head_group import Creditor

if TYPE_CHECKING:
    from kvcommons.engine.remote.plans import BatchPlans


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Of a source's partials: those at `index` belong to `rows` of the batch, no row twice."""

    index: Items[int]
    rows: Items[int]
    placed: tuple[Tensor, Tensor]  # both, as LongTensors on the device
    whole: bool = False  # the partials are the batch's rows as they are


@dataclass(slots=True, kw_only=True)
class Queries:
    """An iteration's, [B, H, D] on the device: for the keys behind a truncated sequence's head, and `shifted`
    for the head's own (None where no sequence has such a head)."""

    plain: Tensor
    shifted: Tensor | None = None

    def of(self, rows: Tensor, heads: Tensor) -> Tensor:
        """[len(rows), H, D]: one for each part; those at `heads` lie in their sequence's head. Both on the
        device."""
        chosen = self.plain.index_select(0, rows)
        if self.shifted is not None and len(heads):
            chosen[heads] = self.shifted.index_select(0, rows[heads])
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSegment:
    """A row's segment on a holder. `tail` takes the row's new K and V."""

    row: int
    run: RemoteRun
    tail: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderShare:
    """What one other holder attends over for this batch, or a part of that. Tensors are in host
    memory."""

    holder: Creditor
    segments: list[RemoteSegment]
    rows: Tensor  # [segments]
    heads: Tensor  # those segments that lie in their sequence's head
    append_rows: Tensor  # of the segments that are tails, in order
    groups: list[Group]
    span: slice | None  # where its rows are these of the batch and take all of its new tokens


def holder_of(sequence: Sequence) -> int:
    """Which holder the sequence's newest blocks are on: one number each, 0 for this instance."""
    return id(sequence.tail.holder) if isinstance(sequence.tail, RemoteRun) else 0


def _even(segments: list[RemoteSegment], pieces: int) -> list[list[RemoteSegment]]:
    """In order, into pieces of about as much KV each; none is empty."""
    if pieces == 1 or len(segments) == 1:
        return [segments]
    whole, before = sum(segment.run.count for segment in segments), 0
    made: list[list[RemoteSegment]] = [[] for _ in range(pieces)]
    for segment in segments:
        middle = before + segment.run.count / 2
        made[min(int(middle * pieces / whole), pieces - 1)].append(segment)
        before += segment.run.count
    return [some for some in made if some]


def by_holder(sequences: Items[Sequence]) -> list[Sequence]:
    """So that what a holder is asked for is in one piece."""
    return sorted(sequences, key=holder_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowIndices:
    """Of a batch, as LongTensors on the device: what picks rows of an iteration's tensors."""

    parts: Tensor  # each part's row
    heads: Tensor  # the batch's part_heads
    appending: Tensor  # its append_rows


@dataclass(slots=True)
class Batch:
    """Rows are `sequences` in order, each there once, or, where drafts are verified, as often as there are
    tokens to compute: its last one, and each of its drafts. Local parts: rows of `tables` [P, nb]; most rows
    have one part, and then parts and rows are the same and nothing is merged (`plain`). Tensors are in host
    memory: plans are made of them."""

    sequences: list[Sequence]
    block_tokens: int
    backend: Backend
    drafts: Items[Items[int]] = ()  # by row: those up to the token that it computes; empty: there are none
    on_device: RowIndices = field(init=False)
    tokens: Tensor = field(init=False)
    positions: Tensor = field(init=False)
    tables: Tensor = field(init=False)
    lengths: Tensor = field(init=False)
    first_keys: Tensor = field(init=False)
    part_rows: Tensor = field(init=False)
    part_groups: list[Group] = field(init=False)
    shares: list[HolderShare] = field(init=False)
    plain: bool = field(init=False)
    dropped: Tensor = field(init=False)  # [B], how much further on than its position a row is rotated
    part_heads: Tensor = field(init=False)  # parts that lie in their sequence's head
    has_heads: bool = field(init=False)
    objectives_s: frozenset[float] = field(init=False)  # between tokens, that these sequences were promised
    kept_tokens: int = field(init=False)  # in local parts
    _tails: Tensor = field(init=False)  # parts that take new tokens
    _growing_runs: list[tuple[Sequence, LocalRun, int]] = field(init=False)  # those, and their rows' drafts
    _growing: Tensor = field(init=False)  # by how many tokens a part grows in an iteration, [P]
    append_rows: Tensor = field(init=False)  # and their rows
    apart: bool = field(init=False)  # each row's KV lies on one holder
    # And each share's rows are neighbours: shares' groups, and the order that makes their rows the batch's.
    _in_order: list[list[Group]] | None = field(init=False)
    _row_order: list[int] = field(init=False)
    messages: int = field(init=False, default=1)  # to each holder, in a layer
    steps: int = field(init=False, default=0)  # since it was built
    plans: BatchPlans | None = field(init=False, default=None)  # of these shares, kept by who sends them

    def __post_init__(self) -> None:
        ahead = [len(drafts) for drafts in self.drafts] or [0] * len(self.sequences)
        parts = [
            (row, run, run is sequence.tail)
            for row, sequence in enumerate(self.sequences)
            for run in sequence.runs
            if isinstance(run, LocalRun)
        ]
        size = self.block_tokens
        widest = max((run.count for _, run, _ in parts), default=1)
        self.tables = torch.zeros((len(parts), widest), dtype=torch.long)
        for part, (_, run, _) in enumerate(parts):
            self.tables[part, : run.count] = torch.frombuffer(run.table(), dtype=torch.long)
        self.first_keys = self._longs([run.first_block * size for _, run, _ in parts])
        self.lengths = self._longs(
            [
                len(self.sequences[row].tokens) + ahead[row] - run.first_block * size
                if tail
                else run.count * size
                for row, run, tail in parts
            ]
        )
        self.part_rows = self._longs([row for row, _, _ in parts])
        self._tails = self._longs([part for part, (_, _, tail) in enumerate(parts) if tail])
        self.append_rows = self.part_rows[self._tails]
        self._growing_runs = [(self.sequences[row], run, ahead[row]) for row, run, tail in parts if tail]
        self._growing = self._longs([int(tail) for _, _, tail in parts])
        self.kept_tokens = int(self.lengths.sum())
        self.tokens = self._longs([sequence.tokens[-1] for sequence in self.sequences])
        self.positions = self._longs([sequence.computed for sequence in self.sequences])
        if self.drafts:
            for row, drafts in enumerate(self.drafts):
                if drafts:
                    self.tokens[row] = drafts[-1]
            self.positions += self._longs(ahead)
        self.dropped = self._longs([s.request.truncated.dropped_tokens for s in self.sequences])
        self.objectives_s = frozenset(s.request.tbt_objective_s for s in self.sequences)
        self.has_heads = any(sequence.head_blocks for sequence in self.sequences)
        self.part_heads = self._longs(
            [part for part, (row, run, _) in enumerate(parts) if self.sequences[row].in_head(run)]
        )
        self.apart = all(len(sequence.runs) == 1 for sequence in self.sequences)
        upload = self.backend.device.upload
        self.on_device = RowIndices(
            parts=upload(self.part_rows), heads=upload(self.part_heads), appending=upload(self.append_rows)
        )
        self._share_out(1)
        self.plain = not self.shares and len(parts) == len(self.sequences)
        self.part_groups = [] if self.plain else self._groups([row for row, _, _ in parts])

    def step(self) -> None:
        """To the next iteration of the same composition, which has no drafts: each sequence has one token
        more."""
        assert not self.drafts
        self.steps += 1
        self.tokens = self._longs([sequence.tokens[-1] for sequence in self.sequences])
        self.positions += 1
        self.lengths += self._growing
        self.kept_tokens += len(self._tails)

    def constrained(self) -> list[tuple[Constraint, Items[int], Items[int]]]:
        """Of each sequence with a grammar: that, its tokens, and its drafts."""
        return [
            (constraint, self.sequences[row].tokens, self.drafts[row] if self.drafts else ())
            for row in self.last_rows()
            if (constraint := self.sequences[row].constraint) is not None
        ]

    def last_rows(self) -> list[int]:
        """Of each sequence its last row."""
        rows = len(self.sequences)
        return [row for row in range(rows) if row + 1 == rows or not self.drafted(row + 1)]

    def drafted(self, row: int) -> bool:
        """Whether the row computes a draft."""
        return bool(self.drafts and self.drafts[row])

    def follows(self, row: int) -> bool:
        """Whether what came are the drafts of a drafted row, and nothing else: what it has sampled is its
        sequence's next token then."""
        sequence, drafts = self.sequences[row], self.drafts[row]
        came = len(sequence.tokens) == int(self.positions[row]) + 1
        return came and not sequence.ended and sequence.tokens[-1] == drafts[-1]

    def divide(self, messages: int) -> None:
        """Each holder's share in so many messages from now on, or in as many as it has rows: a holder that
        attends over the first one receives the second meanwhile."""
        self.messages = messages
        self._share_out(messages)

    def slots(self) -> Tensor:
        """Where the K and V of `append_rows` go: block * block_tokens + offset, in host memory."""
        size, slots = self.block_tokens, []
        for sequence, run, ahead in self._growing_runs:
            block, inside = divmod(sequence.computed + ahead - run.first_block * size, size)
            slots.append(run.blocks[block] * size + inside)
        return self._longs(slots)

    def work(self, block_bytes: int) -> IterationWork:
        """Of an iteration; a block's KV has so many bytes in all layers."""
        away: Counter[Creditor] = Counter()
        for share in self.shares:
            away[share.holder] += sum(segment.run.count for segment in share.segments)
        return IterationWork(
            rows=len(self.sequences),
            read_bytes=self.kept_tokens * block_bytes // self.block_tokens,
            exchanges=int(bool(away)),
            away_bytes=max(away.values(), default=0) * block_bytes,
        )

    def gather(self, contributions: Items[tuple[Items[Group], Partial]], like: Tensor) -> Partial:
        """Merges partials of several sources into one [B, H, D]: each group is laid over the batch's rows,
        empty (lse -inf) where it has none, and the layers are merged exactly. `like` is the query [B, H,
        D]."""
        layers = []
        if self.apart and contributions:
            return self._beside(contributions, like)
        for groups, partial in contributions:
            for group in groups:
                if group.whole:
                    layers.append(partial)
                    continue
                heads, width = partial.out.shape[1:]
                out = partial.out.new_zeros(len(self.sequences), heads, width)
                lse = partial.lse.new_full((len(self.sequences), heads), -torch.inf)
                index, rows = group.placed
                out[rows] = partial.out[index]
                lse[rows] = partial.lse[index]
                layers.append(Partial(out=out, lse=lse))
        if not layers:  # all that these rows have lay on holders that are lost
            return Partial.empty(like)
        return self.backend.attention.merge(layers)

    def _beside(self, contributions: Items[tuple[Items[Group], Partial]], like: Tensor) -> Partial:
        """No row has partials of two sources: nothing to merge. Rows of holders that are lost are empty."""
        if [groups for groups, _ in contributions] == self._in_order:
            partials = [contributions[number][1] for number in self._row_order]
            return Partial(out=torch.cat([p.out for p in partials]), lse=torch.cat([p.lse for p in partials]))
        whole = Partial.empty(like)
        for groups, partial in contributions:
            for group in groups:
                _, rows = group.placed
                whole.out.index_copy_(0, rows, partial.out)
                whole.lse.index_copy_(0, rows, partial.lse)
        return whole

    def _share_out(self, messages: int) -> None:
        by_holder: dict[Creditor, list[RemoteSegment]] = {}
        for row, sequence in enumerate(self.sequences):
            for run in sequence.remote_runs():
                segment = RemoteSegment(row=row, run=run, tail=run is sequence.tail)
                by_holder.setdefault(run.holder, []).append(segment)
        # First the first of each holder, which they begin with at the same time.
        pieces = [(holder, _even(segments, messages)) for holder, segments in by_holder.items()]
        self.shares = [
            self.share(holder, some[number])
            for number in range(messages)
            for holder, some in pieces
            if number < len(some)
        ]
        spans = [share.span for share in self.shares if share.span is not None]
        rows = sorted(range(len(spans)), key=lambda number: spans[number].start)
        ordered = bool(spans) and not len(self.part_rows) and len(spans) == len(self.shares)
        ordered = ordered and spans[rows[0]].start == 0
        ordered = ordered and all(spans[one].stop == spans[next_].start for one, next_ in pairwise(rows))
        self._in_order = [share.groups for share in self.shares] if ordered else None
        self._row_order = rows

    def share(self, holder: Creditor, segments: list[RemoteSegment]) -> HolderShare:
        """What a holder is asked for when these are its segments."""
        rows = [segment.row for segment in segments]
        heads = [i for i, one in enumerate(segments) if self.sequences[one.row].in_head(one.run)]
        appending = [segment.row for segment in segments if segment.tail]
        whole = not heads and appending == list(range(rows[0], rows[0] + len(rows)))
        return HolderShare(
            holder=holder,
            segments=segments,
            rows=self._longs(rows),
            heads=self._longs(heads),
            append_rows=self._longs(appending),
            groups=self._groups(rows),
            span=slice(rows[0], rows[0] + len(rows)) if whole else None,
        )

    def _groups(self, rows: list[int]) -> list[Group]:
        """Splits a source's partials so that no group has a row twice."""
        seen: dict[int, int] = {}
        layers: list[list[int]] = []
        for index, row in enumerate(rows):
            depth = seen.get(row, 0)
            seen[row] = depth + 1
            if depth == len(layers):
                layers.append([])
            layers[depth].append(index)
        return [self._group(layer, [rows[index] for index in layer], rows) for layer in layers]

    def _group(self, index: list[int], rows: list[int], all_rows: list[int]) -> Group:
        longs = self.backend.device.longs
        return Group(
            index=index,
            rows=rows,
            placed=(longs(index), longs(rows)),
            whole=all_rows == list(range(len(self.sequences))),
        )

    def _longs(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long)
