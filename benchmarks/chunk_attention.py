"""`kvcommons bench chunk-attention`: how fast a prompt's chunk attends over its history, against this
machine's matrix products and against torch's operators.

A chunk's attention does 4 * head_dim operations a query head and pair of tokens, and reads each key for all
of its rows: it is bound by arithmetic, whatever its context (Mnemosyne, equation 7). Its limit is the rate of
a matrix product of the same precision. The product, the kernel and torch's operators take turns, so that
ratios are of neighbours in time.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.attention import Heads
from benchmarks.limits import product_rate
from benchmarks.plot import panels
from benchmarks.report import Report, Row, p50

if TYPE_CHECKING:
    from torch import Tensor

    from kvcommons.backend.interface import AttentionBackend

Progress = Callable[[str], None]
_PRODUCT = 1024  # rows and columns
_SPENT_S_MAX = 2.0  # by torch's operators, for a case


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    dtype: str
    rows: int
    context: int  # tokens before the chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Operations a second, of neighbours in time."""

    product: float
    kernel: float
    torch: float


def operations(heads: Heads, case: Case) -> float:
    """Of a causal chunk: half of its pairs with its own tokens count."""
    pairs = case.rows * (case.context + (case.rows + 1) / 2)
    return 4 * heads.head_dim * heads.query_heads * pairs


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(
        "chunk-attention", help="a prompt's chunk over its history, against matrix products and torch"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 128, 512, 2048], metavar="N")
    parser.add_argument("--context", type=int, nargs="+", default=[2048, 16384], metavar="N")
    parser.add_argument(
        "--dtype", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"]
    )
    parser.add_argument("--query-heads", type=int, default=16, metavar="N")
    parser.add_argument("--kv-heads", type=int, default=4, metavar="N")
    parser.add_argument("--head-dim", type=int, default=64, metavar="N")
    parser.add_argument("--block-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
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
        for context in options.context:
            for rows in options.rows:
                case = Case(dtype=dtype, rows=rows, context=context)
                progress(f"{dtype}: {rows} rows after {context} tokens")
                found[case] = _measure(heads, case, options.rounds)
    title = (
        f"A chunk's attention, {heads.query_heads} query heads, {heads.kv_heads} of KV, {heads.head_dim} "
        f"wide, {options.threads} threads"
    )
    return summarise(title, heads, found)


def _measure(heads: Heads, case: Case, rounds: int) -> list[Round]:
    import torch

    from kvcommons.backend.choice import choose
    from kvcommons.backend.native_attention import NativeAttention

    dtype = torch.bfloat16 if case.dtype == "bfloat16" else torch.float32
    generator = torch.Generator().manual_seed(0)
    blocks = -(-(case.context + case.rows) // heads.block_tokens)
    shape = (blocks, 2, heads.kv_heads, heads.block_tokens, heads.head_dim)
    kv = torch.randn(shape, generator=generator).to(dtype)
    q = torch.randn((case.rows, heads.query_heads, heads.head_dim), generator=generator).to(dtype)
    table = torch.randperm(blocks, generator=generator)

    def seconds(attention: AttentionBackend) -> float:
        began_s = time.perf_counter()
        _attend(attention, heads, case, q, kv, table)
        return time.perf_counter() - began_s

    attention, plain, work = choose().attention, NativeAttention(None), operations(heads, case)
    seconds(attention)
    spent_s, found = 0.0, list[Round]()
    torch_s = seconds(plain)
    for _ in range(rounds):
        if spent_s < _SPENT_S_MAX:
            torch_s = seconds(plain)
            spent_s += torch_s
        found.append(
            Round(
                product=product_rate(_PRODUCT, dtype), kernel=work / seconds(attention), torch=work / torch_s
            )
        )
    return found


def _attend(
    attention: AttentionBackend, heads: Heads, case: Case, q: Tensor, kv: Tensor, table: Tensor
) -> None:
    plan = attention.plan_chunk(
        kv, heads.query_heads, table, case.context + case.rows,
        first_key_position=0, query_positions=range(case.context, case.context + case.rows),
    )  # fmt: skip
    plan.attend(q, kv, heads.head_dim**-0.5)


def summarise(title: str, heads: Heads, found: Mapping[Case, Sequence[Round]]) -> Report:
    """Rates are medians over rounds, and ratios medians of each round's."""
    rows: list[Row] = [
        {
            "case": f"{case.dtype}, {case.rows} after {case.context:,}",
            "product GFLOP/s": p50([r.product for r in rounds]) / 1e9,
            "kernel GFLOP/s": p50([r.kernel for r in rounds]) / 1e9,
            "of product %": 100 * p50([r.kernel / r.product for r in rounds]),
            "torch GFLOP/s": p50([r.torch for r in rounds]) / 1e9,
            "over torch": p50([r.kernel / r.torch for r in rounds]),
            "a call ms": operations(heads, case) / p50([r.kernel for r in rounds]) * 1e3,
        }
        for case, rounds in found.items()
    ]
    ratios = {
        "of_product_least": min(float(row["of product %"]) for row in rows) / 100,
        "over_torch_least": min(float(row["over torch"]) for row in rows),
    }
    return Report(title=title, ratios=ratios, rows=rows)


def _draw(path: Path, report: Report) -> None:
    groups = [
        (str(row["case"]), [(name, float(row[f"{name} GFLOP/s"])) for name in ("product", "kernel", "torch")])
        for row in report.rows
    ]
    panels(path, report.title, groups, "GFLOP/s")
