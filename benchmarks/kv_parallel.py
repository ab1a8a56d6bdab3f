"""`kvcommons bench kv-parallel`: one layer's attention over a long context, divided among holders by tokens
(Mnemosyne, section 4.4 and figures 17 and 18).

Real attention pools of one thread each have the KV of one layer, evenly. A token's query, or a chunk's, goes
to all of them, and their partials are merged here. Holders share this machine's memory and cores, so what
they would take with devices of their own is put together from what each takes while the others are idle: the
slowest of them, and the merge. Beside it stands the paper's law (equations 9 and 10): the attention of one
holder divided by their number, and what is no attention as before. All numbers of holders are asked in turn,
round by round, and compared within a round: a machine's speed changes by a third between minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.holders import CALL_S, HolderProcess, fill_with, holder_process
from benchmarks.limits import product_flop_s
from benchmarks.plot import Curves, curves
from benchmarks.report import Report, Row, p50
from benchmarks.store_cost import cpu_clock_s

if TYPE_CHECKING:
    from torch import Tensor

    from kvcommons.backend.interface import Backend, Partial
    from kvcommons.holder.plan import PlanRow
    from kvcommons.holder.segments import SegmentRef
    from kvcommons.rblock.layout import Layout

Progress = Callable[[str], None]
BLOCK_TOKENS = 64
_HEADS, _HEAD_DIM = 8, 128
_PRODUCT = 1024  # rows and columns of the product whose rate is taken for the peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    contexts: tuple[int, ...]
    holders: tuple[int, ...]
    queries: tuple[int, ...]
    rounds: int


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser("kv-parallel", help="one layer's attention divided among holders by tokens")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1 << 18, 1 << 20], metavar="TOKENS")
    parser.add_argument(
        "--holders", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="1 is the base"
    )
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 32], metavar="N", help="1: decode")
    parser.add_argument("--rounds", type=int, default=10, metavar="N")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    setting = Setting(
        contexts=tuple(options.contexts),
        holders=tuple(sorted({1, *options.holders})),
        queries=tuple(options.queries),
        rounds=options.rounds,
    )
    with tempfile.TemporaryDirectory(prefix="kvc-") as name:
        rows = asyncio.run(measure(Path(name), setting, progress))
    return Report(
        title=f"one layer of {_HEADS} heads of {_HEAD_DIM}, divided among holders by tokens; ms",
        ratios={
            f"{row['queries']} over {row['context']:,}, {row['holders']} holders: measured / law": float(
                row["over the law"]
            )
            for row in rows
            if row["holders"] != 1
        },
        rows=rows,
    )


async def measure(folder: Path, setting: Setting, progress: Progress) -> list[Row]:
    import torch

    from kvcommons.backend.choice import choose
    from kvcommons.model.spec import ModelSpec, fingerprint, model_info
    from kvcommons.rblock.layout import Layout

    torch.set_num_threads(1)
    model = _write_model(folder, max(setting.contexts))
    spec = ModelSpec.read(model)
    identity = fingerprint(model, spec, "bfloat16", BLOCK_TOKENS)
    layout = Layout.of(model_info("bench", spec, identity, "bfloat16", BLOCK_TOKENS))
    backend, rows = choose(), list[Row]()
    for context in setting.contexts:
        placed: dict[int, list[_Segment]] = {}
        async with AsyncExitStack() as stack:
            for count in setting.holders:
                progress(f"{context:,} tokens to {count} holders")
                settings = {
                    "model": model, "block_tokens": BLOCK_TOKENS, "threads": 1,
                    "capacity_tokens": -(-context // count) + BLOCK_TOKENS,
                }  # fmt: skip
                opened = [
                    holder_process(
                        "attention_pool", folder, f"{context}-{count}-{number}",
                        f"unix:{folder}/{context}-{count}-{number}.d", identity, settings,
                        environment={"OMP_NUM_THREADS": "1"},
                    )
                    for number in range(count)
                ]  # fmt: skip
                pools = [await stack.enter_async_context(one) for one in opened]
                placed[count] = await _place(layout, pools, context)
            for queries in setting.queries:
                progress(f"{queries} queries over {context:,} tokens")
                rounds = await asyncio.to_thread(
                    _rounds, layout, backend, placed, context, queries, setting.rounds
                )
                rows += [_row(layout, context, count, queries, rounds) for count in setting.holders]
            for segment in (segment for segments in placed.values() for segment in segments):
                await segment.pool.holder.release([segment.ref], timeout_s=CALL_S)
    return rows


def _write_model(folder: Path, context: int) -> Path:
    """Of one layer with the paper's heads, and of little else: pools have no weights."""
    from kvcommons.model.synthetic import random_config, write_random_folder

    config = random_config("7m") | {
        "hidden_size": _HEADS * _HEAD_DIM, "num_hidden_layers": 1, "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS, "intermediate_size": 64, "max_position_embeddings": context + 4096,
    }  # fmt: skip
    write_random_folder(folder / "one-layer", config)
    return folder / "one-layer"


@dataclass(frozen=True, slots=True)
class _Segment:
    """A pool's part of the context."""

    pool: HolderProcess
    ref: SegmentRef
    tokens: range  # their positions


async def _place(layout: Layout, pools: Sequence[HolderProcess], context: int) -> list[_Segment]:
    """With KV of no value, but written: pages that never were read too quickly."""
    content = bytes(byte & 0x3F for byte in os.urandom(layout.object_bytes))  # small numbers, none is NaN
    blocks, segments, first = layout.blocks_of(context), [], 0
    for number, pool in enumerate(pools):
        count = blocks * (number + 1) // len(pools) - first
        tokens = range(first * BLOCK_TOKENS, min((first + count) * BLOCK_TOKENS, context))
        ref = await pool.holder.reserve("bench", count, first_position=tokens.start, timeout_s=CALL_S)
        await asyncio.to_thread(
            fill_with, pool.holder, ref, layout.layers, count, lambda layer, some: [content] * len(some)
        )
        segments.append(_Segment(pool, ref, tokens))
        first += count
    return segments


@dataclass(frozen=True, slots=True)
class _Taken:
    """Seconds of one layer."""

    together_s: float  # all at once, on shared cores
    alone_s: float  # the slowest of those that are asked while the others are idle, and the merge
    computed_s: float  # what that one computed of it
    cpu_s: float  # of a holder's process, on average


@dataclass(frozen=True, slots=True)
class _Round:
    by_holders: dict[int, _Taken]
    peak_flop_s: float  # of products, measured in the same round

    def law_s(self, count: int) -> float:
        """Equations 9 and 10, from what one holder took."""
        one = self.by_holders[1]
        return one.computed_s / count + one.alone_s - one.computed_s


def _rounds(
    layout: Layout,
    backend: Backend,
    placed: Mapping[int, Sequence[_Segment]],
    context: int,
    queries: int,
    rounds: int,
) -> list[_Round]:
    """The first one is not counted."""
    import torch

    q = torch.randn(queries, layout.query_heads, layout.head_dim)
    taken = []
    for _ in range(rounds + 1):
        by_holders = {
            count: _attend(layout, backend, segments, context, q) for count, segments in placed.items()
        }
        taken.append(_Round(by_holders, product_flop_s(_PRODUCT)))
    return taken[1:]


def _attend(
    layout: Layout, backend: Backend, segments: Sequence[_Segment], context: int, q: Tensor
) -> _Taken:
    _, together_s, _ = _ask(layout, backend, segments, context, q)
    before_s = [cpu_clock_s(segment.pool.process.pid) for segment in segments]
    each = [_ask(layout, backend, [segment], context, q) for segment in segments]
    used_s = [
        cpu_clock_s(segment.pool.process.pid) - began_s
        for segment, began_s in zip(segments, before_s, strict=True)
    ]
    began_s = time.monotonic()
    if len(each) > 1:
        backend.attention.merge([partials[0] for partials, _, _ in each])
    merged_s = time.monotonic() - began_s
    slowest = max(each, key=lambda one: one[1])
    return _Taken(together_s, slowest[1] + merged_s, slowest[2], sum(used_s) / len(used_s))


def _ask(
    layout: Layout, backend: Backend, segments: Sequence[_Segment], context: int, q: Tensor
) -> tuple[list[Partial], float, float]:
    """The partials, the seconds until the last one, and what the slowest holder computed of them."""
    from kvcommons.holder.attend_call import begin_attend
    from kvcommons.transport.deadline import Deadline

    began_s, deadline = time.monotonic(), Deadline.after(CALL_S)
    calls = [
        begin_attend(
            layout, backend, segment.pool.holder.recipients([_plan(segment, context, len(q))]), 0, q, None,
            deadline,
        )
        for segment in segments
    ]  # fmt: skip
    answers = [call.finish() for call in calls]
    seconds = time.monotonic() - began_s
    return [partial for partial, _ in answers], seconds, max(one.computed_us for _, one in answers) / 1e6


def _plan(segment: _Segment, context: int, queries: int) -> PlanRow:
    """Queries behind the whole context."""
    from kvcommons.holder.plan import PlanRow

    return PlanRow.of(segment.ref, position=context, length=len(segment.tokens), queries=queries)


def _row(layout: Layout, context: int, count: int, queries: int, rounds: Sequence[_Round]) -> Row:
    """Medians."""
    flop = 4 * queries * context * layout.query_heads * layout.head_dim / count
    taken = [one.by_holders[count] for one in rounds]
    return {
        "queries": queries,
        "context": context,
        "holders": count,
        "MB a holder": layout.blocks_of(context) * layout.object_bytes / count / 1e6,
        "CPU of a holder": p50([one.cpu_s for one in taken]) * 1e3,
        "devices of their own": p50([one.alone_s for one in taken]) * 1e3,
        "not attention": p50([one.alone_s - one.computed_s for one in taken]) * 1e3,
        "law": p50([one.law_s(count) for one in rounds]) * 1e3,
        "over the law": p50([one.by_holders[count].alone_s / one.law_s(count) for one in rounds]),
        "on shared cores": p50([one.together_s for one in taken]) * 1e3,
        "GFLOP/s of a holder": flop / p50([one.computed_s for one in taken]) / 1e9,
        "of the peak": p50([flop / one.by_holders[count].computed_s / one.peak_flop_s for one in rounds]),
    }


def _draw(path: Path, report: Report) -> None:
    curves(path, report.title, list(_groups(report.rows)), columns=2)


def _groups(rows: Sequence[Row]) -> Iterator[Curves]:
    for queries, context in sorted({(int(row["queries"]), int(row["context"])) for row in rows}):
        some = [row for row in rows if row["queries"] == queries and row["context"] == context]
        lines = {
            name: [(float(row["holders"]), float(row[name])) for row in some]
            for name in ("devices of their own", "law", "on shared cores", "CPU of a holder")
        }
        yield f"{queries} of {context:,} tokens over so many holders", "ms", lines
