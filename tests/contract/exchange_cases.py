"""Debtors that ask holders, or head groups, on the native path and in Python, and differ in nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvcommons.backend.choice import choose
from kvcommons.backend.memory import TORCH_DTYPES, BlockMemory, byte_view
from kvcommons.engine.batch import Batch, Queries
from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.remote.attention import RemoteAttention
from kvcommons.engine.remote.plans import NewRows
from kvcommons.engine.request import Request
from kvcommons.engine.sequence import LocalRun, RemoteRun, Run
from kvcommons.engine.sequence import Sequence as Decoded
from kvcommons.engine.truncated import WHOLE, Truncated
from kvcommons.errors import KVCommonsError
from kvcommons.holder.budget import AttentionBudget
from kvcommons.holder.head_group import Creditor
from kvcommons.holder.segments import SegmentRef
from kvcommons.model.sampling import SamplingParams
from kvcommons.rblock.identity import IdentityChain
from kvcommons.rblock.layout import Layout
from kvcommons.transport.base import Observer
from services.decode.staggering.mini_batches import MiniBatches
from tests.backends import asking_in_python
from tests.contract.holder_cases import (
    BLOCK_TOKENS,
    SCALE,
    Served,
    embedded,
    soon,
)
from tests.machine import scaled

ITERATIONS = 3
HERE = -1
LOCAL_BLOCKS = 200


@dataclass(frozen=True, slots=True)
class Row:
    """Of a batch: runs of so many blocks, each on a holder or HERE; the first `head_blocks` are behind a
    truncation."""

    runs: tuple[tuple[int, int], ...]
    head_blocks: int = 0


def rows_of(*runs: tuple[int, int], count: int = 1) -> list[Row]:
    return [Row(runs)] * count


BATCHES = {
    "one row, one holder": rows_of((0, 3)),
    "half of it here": rows_of((0, 2), (HERE, 2)),
    "its tail there": rows_of((HERE, 2), (0, 2)),
    "forty rows on two holders": rows_of((0, 2), count=21) + rows_of((1, 1), count=19),
    "several segments at one holder": rows_of((0, 2), (HERE, 1), (0, 1), (1, 1), (0, 2), count=3),
    "rows here beside rows there": rows_of((HERE, 2), count=2) + rows_of((0, 2), count=2) + rows_of((1, 3)),
    "heads there and here": [
        Row(((0, 2), (0, 2)), head_blocks=2),
        Row(((HERE, 1), (HERE, 1), (1, 2)), head_blocks=1),
        Row(((1, 3),)),
    ],
}  # fmt: skip


@dataclass
class Debtor:
    """Decodes random queries over random KV. Two of the same seed differ in nothing but how they ask."""

    holders: Sequence[Creditor]
    layout: Layout
    mini_batches: int = 1
    deadline_s: float = 20.0
    seed: int = 1
    between: Callable[[int, int], None] = lambda iteration, layer: None  # before it asks
    refs: list[list[SegmentRef]] = field(default_factory=list)
    attention: list[Tensor] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)
    native_layers: int = 0
    order: list[int] = field(default_factory=list)  # the sequence of each row
    waited: list[tuple[str, tuple[float, bool]]] = field(default_factory=list)
    memory: BlockMemory = field(init=False)

    def random(self, *shape: int) -> Tensor:
        self.seed += 1
        source = torch.Generator().manual_seed(self.seed)
        return torch.randn(*shape, generator=source).to(TORCH_DTYPES[self.layout.kv_dtype])

    async def sequences(self, rows: Sequence[Row]) -> list[Decoded]:
        self.memory = BlockMemory(self.layout, LOCAL_BLOCKS)
        self.memory.tensor.copy_(self.random(*self.memory.tensor.shape))
        free = iter(range(LOCAL_BLOCKS))
        made = []
        for key, row in enumerate(rows):
            blocks = sum(count for _, count in row.runs)
            tokens = blocks * BLOCK_TOKENS - ITERATIONS
            truncated = WHOLE
            if row.head_blocks:
                size = row.head_blocks * BLOCK_TOKENS
                truncated = Truncated(head_tokens=size, dropped_tokens=8, since_token=size)
            request = Request(
                request_id="r", session_id="", tenant="t", salt=bytes(32), tokens=tuple(range(tokens - 1)),
                prompt_tokens=tokens - 1, max_position=1000, sampling=SamplingParams(),
                stop_token_ids=frozenset(), store_control="", store_data="", matched_blocks=0, no_reuse=False,
                truncated=truncated,
            )  # fmt: skip
            chain = IdentityChain(bytes(32), bytes(32), BLOCK_TOKENS)
            sequence = Decoded(key=key, request=request, block_tokens=BLOCK_TOKENS, chain=chain)
            refs = []
            for place, count in row.runs:
                first = sequence.blocks
                run: Run
                if place == HERE:
                    run = LocalRun(first_block=first, blocks=[next(free) for _ in range(count)])
                else:
                    holder = self.holders[place]
                    ref = await self._reserve(holder, count, first, row)
                    refs.append(ref)
                    run = RemoteRun(first_block=first, count=count, holder=holder, ref=ref)
                sequence.append_run(run)
            self.refs.append(refs)
            sequence.start(tokens - 1)
            made.append(sequence)
        return made

    async def _reserve(self, holder: Creditor, count: int, first: int, row: Row) -> SegmentRef:
        shift = 8 if row.head_blocks and first < row.head_blocks else 0
        ref = await holder.reserve(
            "s", count, first_position=first * BLOCK_TOKENS, shift=shift, timeout_s=scaled(5)
        )
        for layer in range(self.layout.layers):
            objects = [byte_view(self.random(*self.layout.object_shape)) for _ in range(count)]
            await asyncio.to_thread(holder.write_blocks, ref, layer, 0, objects, soon())
        return ref

    def decode(self, sequences: list[Decoded]) -> None:
        """ITERATIONS of them, as kvcommons.engine.iteration has it."""
        layout, memory, backend = self.layout, self.memory, choose()
        remote = RemoteAttention(layout, backend, AttentionBudget(1.0), MiniBatches(self.mini_batches))
        batch = Batch(sequences, BLOCK_TOKENS, backend)
        count = len(sequences)
        self.order = [sequence.key for sequence in batch.sequences]
        for name, holder in enumerate(self.holders):
            holder.waited = lambda *reported, name=str(name): self.waited.append((name, reported))
        for iteration in range(ITERATIONS):
            timing, places = IterationTiming(), memory.rows_of(batch.slots())
            step = remote.begin(batch, self.deadline_s, timing, (memory, places))
            plan = backend.attention.plan_batch(
                memory.layer(0), batch.tables, batch.lengths, first_key_positions=batch.first_keys,
                query_positions=batch.positions[batch.part_rows],
            )  # fmt: skip
            try:
                for layer in range(layout.layers):
                    self.between(iteration, layer)
                    qkv = self.random(count, layout.query_heads + 2 * layout.kv_heads, layout.head_dim)
                    q, k, v = qkv.split([layout.query_heads, layout.kv_heads, layout.kv_heads], dim=1)
                    shifted = self.random(count, layout.query_heads, layout.head_dim)
                    queries = Queries(plain=q, shifted=shifted if batch.has_heads else None)
                    new = NewRows(layer, queries, k, v)
                    remote.ask(step, new)
                    here = None
                    if len(batch.part_rows):
                        parts = queries.of(batch.part_rows, batch.part_heads)
                        here = plan.attend(parts, memory.layer(layer), SCALE, step.here)
                    whole = remote.collect(step, new, here)
                    self.attention.append(whole.out.clone())
            finally:
                remote.end(step)
            self.native_layers += timing.native_layers
            self.lost = {self.order[row]: str(error) for row, error in step.lost.items()}
            for sequence in batch.sequences:
                sequence.append(1)
            batch.step()
            if self.lost:
                return


async def run(debtor: Debtor, rows: Sequence[Row]) -> Debtor:
    """And gives everything back."""
    sequences = await debtor.sequences(rows)
    with torch.inference_mode():
        await asyncio.to_thread(debtor.decode, sequences)
    for holder in debtor.holders:
        with suppress(KVCommonsError):  # one that was killed
            await holder.release(holder.borrowed, timeout_s=1)
    return debtor


@contextmanager
def in_python() -> Iterator[None]:
    """Nobody is asked on the native path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.contract.exchange_cases.choose", asking_in_python)
        yield


@asynccontextmanager
async def two_holders(folder: Path, transport: str, layout: Layout) -> AsyncIterator[list[Served]]:
    async with AsyncExitStack() as stack:
        made = []
        for number in range(2):
            own = folder / str(number)
            own.mkdir()
            data = "tcp:127.0.0.1:0" if transport == "tcp" else f"unix:{own}/d"
            holder = embedded(own, data=data, blocks=LOCAL_BLOCKS, layout=layout)
            made.append(await stack.enter_async_context(holder))
        yield made


async def both(
    served: Sequence[Served],
    rows: Sequence[Row],
    make: Callable[[list[Creditor]], Debtor],
    observers: Sequence[Observer | None] = (None, None),
) -> tuple[Debtor, Debtor]:
    """What a debtor made on the native path, and what it made in Python."""
    made = []
    for way, observer in zip((nullcontext, in_python), observers, strict=True):
        async with AsyncExitStack() as stack:
            stack.enter_context(way())
            debtors = [one.debtor(observer=observer) for one in served]
            made.append(await run(make([await stack.enter_async_context(one) for one in debtors]), rows))
    return made[0], made[1]


def assert_the_same(natively: Debtor, python: Debtor) -> None:
    """Of all rows that are not lost."""
    assert natively.lost.keys() == python.lost.keys()
    assert len(natively.attention) == len(python.attention) > 0
    kept = [row for row, key in enumerate(natively.order) if key not in natively.lost]
    for one, other in zip(natively.attention, python.attention, strict=True):
        assert torch.isfinite(one[kept]).all()
        assert torch.equal(one[kept], other[kept])
    assert torch.equal(natively.memory.tensor, python.memory.tensor)
