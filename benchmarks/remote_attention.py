"""`kvcommons bench remote-attention`: what it costs that a sequence's KV lies elsewhere.

Two questions of Infinite-LLM. Overhead of distribution (section 6.1): time per token of one sequence, half of
it (or another share) on an attention pool process, against all of it here, both on the same cores; they take
turns, so that ratios are of neighbours in time. Apart, decode computes slices with as many threads as here
(the pool's take turns with them), or with half as many. Query to the KV against KV to the query (figures 11
and 12): one layer's attention over KV on the pool, asked for there, or computed here on KV that is fetched
first.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.holders import CALL_S, decoded, fill, holder_process, tcp_address
from benchmarks.plot import panels
from benchmarks.random_model import write_random_model
from benchmarks.report import Report, Row, p50

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvcommons.engine.core import Core
    from kvcommons.engine.sequence import Run
    from kvcommons.holder.client import RemoteHolder

Progress = Callable[[str], None]
BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    contexts: tuple[int, ...]
    transports: tuple[str, ...]
    tokens: int  # a round
    rounds: int
    threads: int  # of decode; the pool has half as many
    awake_us: int
    away: float  # of the KV, on the pool


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(
        "remote-attention", help="a sequence whose KV lies elsewhere too, against one instance"
    )
    parser.add_argument("--random-model", metavar="SIZE", default="246m", help="random weights: 7m or 246m")
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768], metavar="N")
    parser.add_argument("--transports", nargs="+", default=["tcp", "unix"], metavar="NAME")
    parser.add_argument("--tokens", type=int, default=8, metavar="N", help="of each kind in a round")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument(
        "--threads", type=int, default=2, metavar="N", help="of decode; the pool has half as many"
    )
    parser.add_argument("--awake-us", type=int, default=2000, metavar="N", help="the pool's setting")
    parser.add_argument("--away", type=float, default=0.5, metavar="X", help="of the KV, on the pool")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    setting = Setting(
        contexts=tuple(options.contexts),
        transports=tuple(options.transports),
        tokens=options.tokens,
        rounds=options.rounds,
        threads=options.threads,
        awake_us=options.awake_us,
        away=options.away,
    )
    with tempfile.TemporaryDirectory(prefix="kvc-") as name:
        folder = Path(name)
        window = max(setting.contexts) + 4096
        # On a thread that ends, and its team of OpenMP's with it: see load_core.
        with ThreadPoolExecutor(max_workers=1) as thread:
            writing = thread.submit(
                write_random_model, folder, options.random_model, progress, window_tokens=window
            )
            model = writing.result()
        rows = asyncio.run(_measure(folder, model, setting, progress))
    ratios = {
        f"{name.replace(' ', '_')}_{row['transport']}_{row['context']}": float(row[f"{name} / here"])
        for row in rows
        for name in ("distributed", "threads divided")
    }
    return Report(
        title=f"time per token, {setting.away:.0%} of the KV on a pool (ms), and one layer's attention (ms)",
        ratios=ratios,
        rows=rows,
    )


async def _measure(folder: Path, model: Path, setting: Setting, progress: Progress) -> list[Row]:
    import torch

    from kvcommons.engine.core import load_core
    from kvcommons.engine.settings import EngineSettings

    progress("loading the model")
    core = load_core(
        EngineSettings(
            model=str(model),
            threads=setting.threads,
            block_tokens=BLOCK_TOKENS,
            capacity_tokens=3 * max(setting.contexts) + 8192,
        )
    )
    torch.set_num_threads(1)  # no second team of OpenMP's: see load_core
    core.memory.tensor.normal_()
    rows: list[Row] = []
    for transport in setting.transports:
        async with _pool(folder, model, core, transport, setting) as holder:
            for context in setting.contexts:
                progress(f"{context} tokens over {transport}")
                rows.append(await _context(core, holder, transport, context, setting))
    return rows


@asynccontextmanager
async def _pool(
    folder: Path, model: Path, core: Core, transport: str, setting: Setting
) -> AsyncIterator[RemoteHolder]:
    """A real attention pool."""
    data = f"unix:{folder}/data" if transport == "unix" else tcp_address().replace("tcp", transport, 1)
    settings = {
        "model": model,
        "block_tokens": BLOCK_TOKENS,
        "capacity_tokens": max(setting.contexts) + 4096,
        "threads": max(setting.threads // 2, 1),
        "awake_us": setting.awake_us,
    }
    name, identity = f"pool-{transport}", core.info.fingerprint
    async with holder_process("attention_pool", folder, name, data, identity, settings) as process:
        yield process.holder


async def _context(core: Core, holder: RemoteHolder, transport: str, context: int, setting: Setting) -> Row:
    """`context` tokens, and those that the rounds add."""
    from kvcommons.engine.sequence import LocalRun, RemoteRun

    grown = context + (setting.rounds + 1) * setting.tokens * 2
    blocks = core.layout.blocks_of(grown + 1)
    away = int(context * setting.away) // BLOCK_TOKENS
    whole = core.allocator.allocate(blocks)
    rest = core.allocator.allocate(blocks - away)
    ref = await holder.reserve("bench", blocks, first_position=0, timeout_s=CALL_S)
    try:
        await asyncio.to_thread(fill, core, holder, ref, blocks)
        here: list[Run] = [LocalRun(first_block=0, blocks=whole)]
        apart: list[Run] = [
            RemoteRun(first_block=0, count=away, holder=holder, ref=ref),
            LocalRun(first_block=away, blocks=rest),
        ]
        row: Row = {"transport": transport, "context": context}
        tokens = await asyncio.to_thread(_tokens, core, context, here, apart, setting)
        layer = await asyncio.to_thread(_one_layer, core, holder, ref, context, setting)
        return {**row, **tokens, **layer}
    finally:
        core.allocator.release(whole + rest)
        await holder.release([ref], timeout_s=CALL_S)


def _tokens(
    core: Core, context: int, here: Sequence[Run], apart: Sequence[Run], setting: Setting
) -> dict[str, float]:
    """Medians of a token's time: all here; half elsewhere, slices with all threads as here; and with half of
    them, the pool has the others. Ratios are of neighbours in time: medians of the rounds' own."""
    import torch

    with torch.inference_mode():
        divided = max(setting.threads // 2, 1)
        distributed = _Stepper(core, context, apart)
        kinds = {
            "here": (setting.threads, _Stepper(core, context, here)),
            "distributed": (setting.threads, distributed),
            "threads divided": (divided, distributed),
        }
        taken_s: dict[str, list[float]] = {name: [] for name in kinds}
        of_rounds: list[dict[str, float]] = []
        for round_ in range(setting.rounds + 1):
            of_rounds.append({})
            for name, (threads, stepper) in kinds.items():
                torch.set_num_threads(threads)
                seconds = [stepper.step() for _ in range(setting.tokens)]
                of_rounds[-1][name] = p50(seconds)
                if round_:  # the first one warms up
                    taken_s[name] += seconds
        torch.set_num_threads(setting.threads)
    medians = {name: p50(seconds) * 1e3 for name, seconds in taken_s.items()}
    ratios = {
        f"{name} / here": p50([one[name] / one["here"] for one in of_rounds[1:]])
        for name in ("distributed", "threads divided")
    }
    return {**medians, **ratios}


class _Stepper:
    """One sequence of `context` tokens, decoded token by token."""

    def __init__(self, core: Core, context: int, runs: Sequence[Run]) -> None:
        from kvcommons.engine.batch import Batch
        from kvcommons.engine.remote.attention import RemoteAttention
        from kvcommons.holder.budget import AttentionBudget
        from services.decode.staggering.mini_batches import MiniBatches

        self._core = core
        budget = AttentionBudget(1.0)
        self._remote = RemoteAttention(core.layout, core.backend, budget, MiniBatches())
        self._sequence = decoded(core, 1, context, 1 << 30, runs)
        self._sequence.start(1)
        self._batch = Batch([self._sequence], core.block_tokens, core.backend)

    def step(self) -> float:
        """Seconds."""
        from kvcommons.engine.iteration import Iteration
        from kvcommons.engine.token_rows import TokenRows

        rows = TokenRows(self._core, self._remote, self._batch, CALL_S)
        iteration = Iteration(self._core, [rows])
        ((token,),) = iteration.run()
        for error in [*rows.lost.values(), *iteration.failures.values()]:
            raise error
        self._sequence.append(token.token)
        self._batch.step()
        return iteration.timing.seconds


def _one_layer(
    core: Core, holder: RemoteHolder, ref: object, context: int, setting: Setting
) -> dict[str, float]:
    """Medians: the query goes to the KV, or the KV comes and is attended over here."""
    import torch

    from kvcommons.holder.attend_call import begin_attend
    from kvcommons.holder.plan import PlanRow
    from kvcommons.holder.segments import SegmentRef
    from kvcommons.transport.deadline import Deadline

    assert isinstance(ref, SegmentRef)
    layout, model = core.layout, core.model
    q = torch.randn(1, layout.query_heads, layout.head_dim)
    blocks = core.allocator.allocate(context // BLOCK_TOKENS)
    table = torch.tensor([blocks])
    part = PlanRow.of(ref, position=context, length=context)
    asked_s: list[float] = []
    fetched_s: list[float] = []
    try:
        with torch.inference_mode():
            for round_ in range(setting.rounds + 1):
                layer = round_ % layout.layers
                began_s = time.monotonic()
                asked = holder.recipients([part])
                begin_attend(layout, core.backend, asked, layer, q, None, Deadline.after(CALL_S)).finish()
                asked_s.append(time.monotonic() - began_s)
                began_s = time.monotonic()
                for first in range(0, len(blocks), 64):
                    some = blocks[first : first + 64]
                    with core.memory.write_buffers(layer, some) as buffers:
                        holder.read_blocks(ref, layer, first, buffers, Deadline.after(CALL_S))
                kv = core.memory.layer(layer)
                plan = core.backend.attention.plan_batch(
                    kv, table, torch.tensor([context]),
                    first_key_positions=torch.tensor([0]), query_positions=torch.tensor([context]),
                )  # fmt: skip
                plan.attend(q, kv, model.scale)
                fetched_s.append(time.monotonic() - began_s)
    finally:
        core.allocator.release(blocks)
    return {"query to KV": p50(asked_s[1:]) * 1e3, "KV to query": p50(fetched_s[1:]) * 1e3}


def _draw(path: Path, report: Report) -> None:
    groups = [
        (
            f"{row['context']:,} tokens over {row['transport']}",
            [(name, float(row[name])) for name in ("here", "distributed", "query to KV", "KV to query")],
        )
        for row in report.rows
    ]
    panels(path, report.title, groups, "ms")
