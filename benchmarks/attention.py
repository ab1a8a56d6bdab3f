"""`kvcommons bench attention`: how fast attention over paged KV is, against reading that memory and against
torch.

One decode step of one layer, over and over: blocks lie shuffled in memory far larger than the caches, and
what a call reads was last read a round ago. Each round reads the memory, then attends with the kernel, then
with torch's operators, so that ratios are of neighbours in time.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.plot import panels
from benchmarks.report import Report, Row, p50
from kvcommons.errors import Unavailable

if TYPE_CHECKING:
    from torch import Tensor

    from kvcommons.backend.interface import AttentionBackend, BatchPlan

Progress = Callable[[str], None]
ROUNDS_MIN = 3
# Of the pool in torch's part of a round: it takes several times as long for each byte.
TORCH_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    dtype: str
    batch: int
    context: int  # tokens of each sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    query_heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Bytes a second, of neighbours in time."""

    read: float
    kernel: float
    torch: float


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(
        "attention", help="the kernel against the memory's bandwidth and against torch's operators"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], metavar="N", help="sequences")
    parser.add_argument(
        "--context", type=int, nargs="+", default=[4096, 32768, 131072], metavar="N", help="tokens of each"
    )
    parser.add_argument(
        "--dtype", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"]
    )
    parser.add_argument("--query-heads", type=int, default=32, metavar="N")
    parser.add_argument("--kv-heads", type=int, default=8, metavar="N")
    parser.add_argument("--head-dim", type=int, default=128, metavar="N")
    parser.add_argument("--block-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--pool-mib", type=int, default=2048, metavar="N", help="memory that blocks lie in")
    parser.add_argument("--seconds", type=float, default=3.0, metavar="S", help="for each row of the table")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    import torch

    heads = Heads(
        query_heads=options.query_heads, kv_heads=options.kv_heads,
        head_dim=options.head_dim, block_tokens=options.block_tokens,
    )  # fmt: skip
    torch.set_num_threads(options.threads)
    found: dict[Case, list[Round]] = {}
    for dtype in options.dtype:
        progress(f"filling {options.pool_mib} MiB with {dtype}")
        pool = Pool(heads, dtype, options.pool_mib << 20)
        for batch in options.batch:
            for context in options.context:
                case = Case(dtype=dtype, batch=batch, context=context)
                progress(f"{dtype}: batch {batch}, {context} tokens")
                found[case] = pool.measure(case, options.seconds)
        del pool
    title = (
        f"Partial attention, {heads.query_heads} query heads, {heads.kv_heads} of KV, {heads.head_dim} wide, "
        f"blocks of {heads.block_tokens}, {options.threads} threads"
    )
    return summarise(title, heads, found)


class Pool:
    """Random KV of one layer, as a holder has it in memory. Raises Unavailable where there is no kernel."""

    def __init__(self, heads: Heads, dtype: str, pool_bytes: int) -> None:
        import torch

        from kvcommons.backend.choice import choose
        from kvcommons.backend.memory import BlockMemory
        from kvcommons.backend.native_attention import NativeAttention
        from kvcommons.rblock.layout import Layout

        self._attention = choose().attention
        self._torch = NativeAttention(None)
        kernel = self._attention.kernel if isinstance(self._attention, NativeAttention) else None
        if kernel is None:
            raise Unavailable(
                "there is no attention kernel: it takes a C++ compiler, and KVCOMMONS_KERNEL unset"
            )
        self._kernel = kernel
        self._heads = heads
        layout = Layout(
            layers=1, kv_heads=heads.kv_heads, block_tokens=heads.block_tokens, head_dim=heads.head_dim,
            kv_dtype=dtype, query_heads=heads.query_heads,
        )  # fmt: skip
        self._block_bytes = layout.block_bytes
        self._memory = BlockMemory(layout, max(pool_bytes // layout.block_bytes, 1))
        flat = self._memory.tensor.view(-1)
        drawn = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).to(flat.dtype)
        for first in range(0, len(flat), len(drawn)):
            part = flat[first : first + len(drawn)]
            part.copy_(drawn[: len(part)])

    def measure(self, case: Case, seconds: float) -> list[Round]:
        import torch

        heads = self._heads
        q = torch.randn(case.batch, heads.query_heads, heads.head_dim).to(self._memory.tensor.dtype)
        plans = self._plans(case, self._attention)
        few = self._plans(case, self._torch)[: max(int(len(plans) * TORCH_SHARE), 1)]
        self._attend(few[:1], q)
        self._attend(plans, q)
        call_bytes = -(-case.context // heads.block_tokens) * case.batch * self._block_bytes
        rounds: list[Round] = []
        until = time.perf_counter() + seconds
        while len(rounds) < ROUNDS_MIN or time.perf_counter() < until:
            read_s = _seconds(lambda: self._kernel.read(self._memory.tensor))
            kernel_s = _seconds(lambda: self._attend(plans, q))
            torch_s = _seconds(lambda: self._attend(few, q))
            rounds.append(
                Round(
                    read=self._memory.blocks * self._block_bytes / read_s,
                    kernel=call_bytes * len(plans) / kernel_s,
                    torch=call_bytes * len(few) / torch_s,
                )
            )
        return rounds

    def _plans(self, case: Case, attention: AttentionBackend) -> list[BatchPlan]:
        """Of as many calls as it takes to read all of the memory."""
        import torch

        width = -(-case.context // self._heads.block_tokens)
        blocks = torch.randperm(self._memory.blocks, generator=torch.Generator().manual_seed(1))
        plans = []
        for call in range(max(self._memory.blocks // (width * case.batch), 1)):
            index = torch.arange(width * case.batch) + call * width * case.batch
            lengths = torch.full((case.batch,), case.context)
            plans.append(
                attention.plan_batch(
                    self._memory.layer(0),
                    blocks[index % len(blocks)].view(case.batch, width),
                    lengths,
                    first_key_positions=torch.zeros_like(lengths),
                    query_positions=lengths - 1,
                )
            )
        return plans

    def _attend(self, plans: Sequence[BatchPlan], q: Tensor) -> None:
        for plan in plans:
            plan.attend(q, self._memory.layer(0), self._heads.head_dim**-0.5)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def summarise(title: str, heads: Heads, found: Mapping[Case, Sequence[Round]]) -> Report:
    """Rates are medians over rounds, and ratios medians of each round's."""
    rows: list[Row] = []
    for case, rounds in found.items():
        token_bytes = 2 * heads.kv_heads * heads.head_dim * (2 if case.dtype == "bfloat16" else 4)
        kernel = p50([r.kernel for r in rounds])
        rows.append(
            {
                "case": f"{case.dtype}, {case.batch} x {case.context:,}",
                "reading GB/s": p50([r.read for r in rounds]) / 1e9,
                "kernel GB/s": kernel / 1e9,
                "of reading %": 100 * p50([r.kernel / r.read for r in rounds]),
                "torch GB/s": p50([r.torch for r in rounds]) / 1e9,
                "torch of reading %": 100 * p50([r.torch / r.read for r in rounds]),
                "over torch": p50([r.kernel / r.torch for r in rounds]),
                "a call ms": case.batch * case.context * token_bytes / kernel * 1e3,
            }
        )
    ratios = {
        "of_reading_least": min(float(row["of reading %"]) for row in rows) / 100,
        "over_torch_least": min(float(row["over torch"]) for row in rows),
    }
    return Report(title=title, ratios=ratios, rows=rows)


def _draw(path: Path, report: Report) -> None:
    groups = [
        (str(row["case"]), [(name, float(row[f"{name} GB/s"])) for name in ("reading", "kernel", "torch")])
        for row in report.rows
    ]
    panels(path, report.title, groups, "GB/s")
