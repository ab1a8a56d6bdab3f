"""`kvcommons bench offload`: a batch as large as the pool, against one as large as this instance's memory.

Lamina, section 6: decode with all KV on attention pool processes (`offload`) against decode with all of it in
its own memory (`local`), each as large a batch as there is room for, at equal memory per instance. Sequences
that end are replaced at once (continuous batching), with KV that is there already: no prompt is computed.
The kinds take turns, so that ratios are of neighbours in time. Of a step, what it spends where, as in the
paper's figure 14, and what it would take at least: its slices with nothing else under way, and its KV at the
bandwidth of all cores, both measured beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from benchmarks.holders import CALL_S, HolderProcess, attention_pools, decoded, fill
from benchmarks.limits import read_memory
from benchmarks.plot import stacked_bars
from benchmarks.random_model import write_random_model
from benchmarks.replacing import Replacing
from benchmarks.report import Report, Row

if TYPE_CHECKING:
    from kvcommons.engine.callbacks import SequenceUpdate
    from kvcommons.engine.core import Core
    from kvcommons.engine.iteration_timing import IterationTiming
    from kvcommons.engine.sequence import RemoteRun, Run

Progress = Callable[[str], None]
T = TypeVar("T")
BLOCK_TOKENS = 64
WARM_S = 1.0
_TIMES = 7  # that slices and reading are measured beside a load
PARTS = ("slices", "attention", "network", "waiting", "rest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    contexts: tuple[int, ...]
    batch: int  # of `reference` tokens each, for which decode has memory
    reference: int
    answer: int
    pools: int
    pool_memory: float  # of a pool, over decode's
    rounds: int
    seconds: float
    threads: int
    transport: str

    @property
    def capacity_tokens(self) -> int:
        return self.batch * self.capacity(self.reference) * BLOCK_TOKENS

    def capacity(self, context: int) -> int:
        """Blocks of a sequence, its answer included."""
        return -(-(context + self.answer + 1) // BLOCK_TOKENS)

    @property
    def pool_tokens(self) -> int:
        return int(self.capacity_tokens * self.pool_memory)

    def fits(self, context: int, tokens: int) -> int:
        """Sequences in an instance with room for so many tokens."""
        return tokens // BLOCK_TOKENS // self.capacity(context)


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(
        "offload", help="decode with all KV on attention pools, against all of it here"
    )
    parser.add_argument("--random-model", metavar="SIZE", default="246m", help="random weights: 34m or 246m")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048], metavar="N")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="that decode has memory for")
    parser.add_argument("--reference", type=int, default=2048, metavar="N", help="at this context")
    parser.add_argument("--answer", type=int, default=128, metavar="N", help="tokens of each sequence")
    parser.add_argument("--pools", type=int, default=3, metavar="N")
    parser.add_argument(
        "--pool-memory", type=float, default=1.0, metavar="X", help="of a pool, times that of decode"
    )
    parser.add_argument("--rounds", type=int, default=2, metavar="N")
    parser.add_argument("--seconds", type=float, default=6.0, metavar="S", help="of each kind in a round")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of decode; pools have one each")
    parser.add_argument("--transport", choices=("shm", "unix"), default="shm")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    setting = Setting(
        contexts=tuple(options.contexts),
        batch=options.batch,
        reference=options.reference,
        answer=options.answer,
        pools=options.pools,
        pool_memory=options.pool_memory,
        rounds=options.rounds,
        seconds=options.seconds,
        threads=options.threads,
        transport=options.transport,
    )
    with tempfile.TemporaryDirectory(prefix="kvc-") as name:
        model = _apart(lambda: write_random_model(Path(name), options.random_model, progress))
        rows = asyncio.run(_measure(Path(name), model, setting, progress))
    return Report(
        title=f"{options.random_model}: room for {setting.batch} sequences of {setting.reference} in decode "
        f"and {setting.pool_memory:g} times as much in each of {setting.pools} pools; ms of a step",
        ratios=_ratios(rows),
        rows=rows,
    )


def _apart(work: Callable[[], T]) -> T:
    """On a thread that ends, and OpenMP's team with it: where teams have more threads than there are cores,
    none stays awake between two operations, and slices take half as long again."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(work).result()


def _ratios(rows: Sequence[Row]) -> dict[str, float]:
    rates = {(row["context"], row["how"]): float(row["tokens/s"]) for row in rows}
    return {
        f"{how}_{context}".replace(", ", "_"): rate / rates[context, "local"]
        for (context, how), rate in rates.items()
        if how != "local"
    }


async def _measure(folder: Path, model: Path, setting: Setting, progress: Progress) -> list[Row]:
    from kvcommons.engine.core import load_core
    from kvcommons.engine.settings import EngineSettings

    progress("loading the model")
    core = await asyncio.to_thread(
        load_core,
        EngineSettings(
            model=str(model),
            threads=setting.threads,
            block_tokens=BLOCK_TOKENS,
            capacity_tokens=setting.capacity_tokens,
        ),
    )
    _apart(core.memory.tensor.normal_)
    rows: list[Row] = []
    async with attention_pools(
        folder, model, core, count=setting.pools, capacity_tokens=setting.pool_tokens,
        transport=setting.transport,
    ) as pools:  # fmt: skip
        for context in setting.contexts:
            progress(f"filling the pools with KV of {context} tokens a sequence")
            runs = await _borrow(core, pools, context, setting)
            kinds = {
                "local": _Load(core, context, setting, pools, None, "off"),
                "offload": _Load(core, context, setting, pools, runs, "off"),
                "offload, pipelined": _Load(core, context, setting, pools, runs, "on"),
            }
            for round_ in range(setting.rounds):
                for name, load in kinds.items():
                    progress(f"context {context}, {name}, {round_ + 1} of {setting.rounds}")
                    await load.take()
            rows += [{"context": context, "how": name, **load.row()} for name, load in kinds.items()]
            for pool in pools:
                await pool.holder.release(pool.holder.borrowed, timeout_s=CALL_S)
    return rows


async def _borrow(
    core: Core, pools: Sequence[HolderProcess], context: int, setting: Setting
) -> list[RemoteRun]:
    """As many sequences' as fit, in turn from one pool and the next."""
    from kvcommons.engine.sequence import RemoteRun

    blocks = setting.capacity(context)
    runs = []
    for number in range(setting.fits(context, setting.pool_tokens)):
        for pool in pools:
            holder = pool.holder
            ref = await holder.reserve(f"bench-{number}", blocks, first_position=0, timeout_s=CALL_S)
            await asyncio.to_thread(fill, core, holder, ref, blocks)
            runs.append(RemoteRun(first_block=0, count=blocks, holder=holder, ref=ref))
    return runs


def _least_s(core: Core, batch: int, tokens: int) -> float:
    """Seconds of a step at least: slices of `batch` rows, then `tokens` of KV read by all cores."""
    import torch

    from kvcommons.model.sampling import SamplingParams, SamplingRow, sample

    model, layout = core.model, core.layout
    row = SamplingRow(params=SamplingParams(), position=0, generated={})

    def slices() -> None:
        state = model.begin(torch.ones(batch, dtype=torch.int64), torch.arange(batch))
        for layer in range(layout.layers - 1):
            state = model.advance(layer, state, state.q)
        sample(model.end(state, state.q, range(batch)), [row] * batch, core.backend.device)

    with torch.inference_mode():
        slices_s, read_s = _median_s(slices), _median_s(lambda: read_memory(core))
    kv_bytes = tokens * layout.layers * layout.object_bytes / layout.block_tokens
    return slices_s + read_s * kv_bytes / core.memory.tensor.nbytes


def _median_s(work: Callable[[], None]) -> float:
    def once() -> float:
        began_s = time.monotonic()
        work()
        return time.monotonic() - began_s

    once()
    return statistics.median(once() for _ in range(_TIMES))


class _Load(Replacing):
    """One way to place the KV, with a batch as large as has room. It is the engine's EngineCallbacks, and its
    metrics."""

    def __init__(
        self,
        core: Core,
        context: int,
        setting: Setting,
        pools: Sequence[HolderProcess],
        away: Sequence[RemoteRun] | None,
        pipelining: Literal["auto", "on", "off"],
    ) -> None:
        """`away`: where sequences lie; None: here."""
        super().__init__()
        self._pipelining = pipelining
        self._core = core
        self._context = context
        self._setting = setting
        self._pools = pools
        self._away = away
        self._batch = setting.fits(context, setting.capacity_tokens) if away is None else len(away)
        self._keys = itertools.count(1)
        self._held: dict[int, list[int]] = {}  # blocks here, by sequence
        self._seconds = 0.0
        self._steps = 0
        self._spent_s = dict.fromkeys(PARTS, 0.0)
        self._pool_s = 0.0
        self._least_s: list[float] = []
        self._cpu_s = {"decode": 0.0, "pools": 0.0}

    async def take(self) -> None:
        """One turn."""
        from kvcommons.blockstore.saver import BlockSaver
        from kvcommons.engine.keeper import BlockKeeper
        from kvcommons.engine.scheduler import Scheduler
        from kvcommons.holder.budget import AttentionBudget
        from services.decode.batching.engine import decode_engine

        core, setting = self._core, self._setting
        saver = BlockSaver("bench", buffer_bytes=1 << 20)
        keeper = BlockKeeper(core, saver)
        engine = decode_engine(
            core, scheduler=Scheduler(max_batch=self._batch), may_borrow=False, attend_deadline_s=CALL_S,
            budget=AttentionBudget(1.0), keeper=keeper, callbacks=self, metrics=self,
            pipelining=self._pipelining,
        )  # fmt: skip
        self._engine = engine
        self._free = list(self._away or ())
        self._stopping = False
        for number in range(self._batch):  # they end one after another, not all at once
            self._begin(self._context + number * setting.answer // self._batch)
        engine.start()
        try:
            await asyncio.sleep(WARM_S)
            began_s, self._counting = time.monotonic(), True
            before = self._cpu()
            await asyncio.sleep(setting.seconds)
            self._counting = False
            self._seconds += time.monotonic() - began_s
            for name, seconds in self._cpu().items():
                self._cpu_s[name] += seconds - before[name]
        finally:
            self._stopping = True
            await asyncio.to_thread(engine.stop, CALL_S)
            for blocks in self._held.values():  # of sequences that the engine had not heard of yet
                core.allocator.release(blocks)
            self._held.clear()
            await asyncio.to_thread(keeper.close)
        tokens = self._batch * (self._context + setting.answer // 2)
        self._least_s.append(await asyncio.to_thread(_apart, lambda: _least_s(core, self._batch, tokens)))

    def _cpu(self) -> dict[str, float]:
        return {"decode": time.process_time(), "pools": sum(pool.cpu_s() for pool in self._pools)}

    def row(self) -> dict[str, float | int]:
        steps = max(self._steps, 1)
        rate, limit = self._tokens / self._seconds, self._batch / statistics.median(self._least_s)
        return {
            "batch": self._batch,
            "tokens/s": rate,
            "limit tokens/s": limit,
            "of the limit": rate / limit,
            "step ms": self._seconds / steps * 1e3,
            **{f"{part} ms": seconds / steps * 1e3 for part, seconds in self._spent_s.items()},
            "pool's attention ms": self._pool_s / steps * 1e3,
            **{f"{name} CPU ms": seconds / steps * 1e3 for name, seconds in self._cpu_s.items()},
        }

    def _begin(self, tokens: int) -> None:
        from kvcommons.engine.sequence import LocalRun, RemoteRun
        from kvcommons.pb import common_pb2

        key, blocks = next(self._keys), self._setting.capacity(self._context)
        run: Run
        if self._away is None:
            run = LocalRun(first_block=0, blocks=self._core.allocator.allocate(blocks))
            self._held[key] = run.blocks
        else:
            known = self._free.pop(0)
            run = RemoteRun(first_block=0, count=known.count, holder=known.holder, ref=known.ref)
        end = self._context + self._setting.answer
        self._engine.add(decoded(self._core, key, tokens, end, [run]))
        self._engine.begin(key, common_pb2.SampledToken(token=1))

    # Beside Replacing's, on the engine's thread.

    def _replace(self) -> None:
        self._begin(self._context)

    def iteration(self, batch: int, timing: IterationTiming) -> None:
        if self._counting:
            self._steps += 1
            parts = timing.parts
            for part in PARTS:  # nothing else happens here
                self._spent_s[part] += parts[part]
            self._pool_s += timing.pool_s

    def verified(self, drafted: int, accepted: int) -> None:
        """Nothing is drafted."""

    def ended(self, step: SequenceUpdate) -> None:
        self._held.pop(step.key, None)


def _draw(path: Path, report: Report) -> None:
    rows = [{**row, "what": f"{row['context']}, {row['how']} ({row['batch']})"} for row in report.rows]
    stacked_bars(path, report.title, rows, [f"{part} ms" for part in PARTS], "what", "ms of a step", " ms")
