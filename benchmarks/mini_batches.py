"""`kvcommons bench mini-batches`: how much of the messages to a holder is hidden behind its attention.

Lamina, section 5.2.1 and figure 16: one holder has all KV of a batch, and is sent its queries layer by layer,
in one message or in several. There are no slices between: queries go out, partials come back. Over TCP on one
host, and over links that are slower. The kinds take turns, an iteration each.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.holders import CALL_S, decoded, fill, holder_process, tcp_address
from benchmarks.plot import panels
from benchmarks.random_model import write_random_model
from benchmarks.report import Report, Row, p50

if TYPE_CHECKING:
    from kvcommons.engine.core import Core
    from kvcommons.holder.client import RemoteHolder
    from kvcommons.holder.segments import SegmentRef

Progress = Callable[[str], None]
BLOCK_TOKENS = 64
AUTO = 0  # decode's own decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    batch: int
    context: int
    mini_batches: tuple[int, ...]
    mbytes_s: tuple[float, ...]  # of links; 0: none between
    rounds: int

    @property
    def blocks(self) -> int:
        """Of a sequence and what the rounds add."""
        tokens = self.context + (self.rounds + 1) * (len(self.mini_batches) + 1) + 1
        return -(-tokens // BLOCK_TOKENS)


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(
        "mini-batches", help="a holder's share of a batch in several messages, against one"
    )
    parser.add_argument("--random-model", metavar="SIZE", default="246m", help="random weights: 7m or 246m")
    parser.add_argument("--batch", type=int, default=64, metavar="N")
    parser.add_argument("--context", type=int, default=512, metavar="N", help="tokens of each sequence")
    parser.add_argument("--mini-batches", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    parser.add_argument(
        "--mbytes", type=float, nargs="+", default=[0.0, 1000.0, 300.0, 100.0], metavar="N",
        help="that the link lets through a second, each way; 0: TCP on one host as it is",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=8, metavar="N")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    setting = Setting(
        batch=options.batch,
        context=options.context,
        mini_batches=tuple(sorted({1, *options.mini_batches})),
        mbytes_s=tuple(options.mbytes),
        rounds=options.rounds,
    )
    with tempfile.TemporaryDirectory(prefix="kvc-") as name:
        folder = Path(name)
        model = write_random_model(folder, options.random_model, progress)
        rows = asyncio.run(_measure(folder, model, setting, progress))
    return Report(
        title=f"{setting.batch} sequences of {setting.context} tokens on one holder: ms of a layer",
        ratios={
            f"hidden_{str(row['mini-batches']).partition(':')[0]}_{row['MB/s']}": float(row["hidden %"]) / 100
            for row in rows
            if row["mini-batches"] != "1"
        },
        rows=rows,
    )


async def _measure(folder: Path, model: Path, setting: Setting, progress: Progress) -> list[Row]:
    from kvcommons.engine.core import load_core
    from kvcommons.engine.settings import EngineSettings
    from kvcommons.holder.client import RemoteHolder

    progress("loading the model")
    core = load_core(
        EngineSettings(
            model=str(model), block_tokens=BLOCK_TOKENS, capacity_tokens=setting.blocks * BLOCK_TOKENS
        )
    )
    core.memory.tensor.normal_()
    settings = {
        "model": model,
        "block_tokens": BLOCK_TOKENS,
        "capacity_tokens": setting.batch * setting.blocks * BLOCK_TOKENS,
        "threads": 1,
    }
    data, identity = tcp_address(), core.info.fingerprint
    rows: list[Row] = []
    async with holder_process("attention_pool", folder, "pool", data, identity, settings) as process:
        holder = process.holder
        progress("filling the pool")
        refs = []
        for number in range(setting.batch):
            ref = await holder.reserve(f"bench-{number}", setting.blocks, first_position=0, timeout_s=CALL_S)
            await asyncio.to_thread(fill, core, holder, ref, setting.blocks)
            refs.append(ref)
        for mbytes_s in setting.mbytes_s:
            progress(f"{mbytes_s:g} MB/s" if mbytes_s else "no link between")
            with _link(data, mbytes_s) as address:
                far = RemoteHolder(
                    holder.control_address, address, owner="bench", model=identity, lost=lambda refs: None
                )
                samples = await asyncio.to_thread(_layers, core, far, refs, setting)
                await far.close()
            rows += _rows(mbytes_s, samples, setting)
    return rows


@contextmanager
def _link(data: str, mbytes_s: float) -> Iterator[str]:
    """The address to ask instead of `data`."""
    if not mbytes_s:
        yield data
        return
    relay = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.limited_link", data.partition(":")[2], str(mbytes_s * 1e6)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert relay.stdout is not None
        yield f"tcp:127.0.0.1:{int(relay.stdout.readline())}"
    finally:
        relay.kill()
        relay.wait()


@dataclass(frozen=True, slots=True)
class _Sample:
    """By a layer, in all and by the holder's attention; in so many mini-batches."""

    seconds: float
    attention_s: float
    mini_batches: int


def _layers(
    core: Core, holder: RemoteHolder, refs: list[SegmentRef], setting: Setting
) -> dict[int, list[_Sample]]:
    """By what was asked for: AUTO, or a number of mini-batches. The first round warms up."""
    import torch

    from kvcommons.engine.batch import Batch, Queries
    from kvcommons.engine.iteration_timing import IterationTiming
    from kvcommons.engine.remote.attention import RemoteAttention
    from kvcommons.engine.remote.plans import NewRows
    from kvcommons.engine.sequence import RemoteRun
    from kvcommons.holder.budget import AttentionBudget
    from services.decode.staggering.mini_batches import MiniBatches

    layout, backend = core.layout, core.backend
    sequences = []
    for number, ref in enumerate(refs):
        run = RemoteRun(first_block=0, count=setting.blocks, holder=holder, ref=ref)
        sequences.append(decoded(core, number, setting.context, 1 << 30, [run]))
        sequences[-1].start(1)
    batch = Batch(sequences, core.block_tokens, backend)
    kinds = {
        number: RemoteAttention(layout, backend, AttentionBudget(1.0), MiniBatches(number))
        for number in (*setting.mini_batches, AUTO)
    }
    samples: dict[int, list[_Sample]] = {number: [] for number in kinds}
    q = torch.randn(setting.batch, layout.query_heads, layout.head_dim, dtype=torch.bfloat16)
    k, v = torch.randn(2, setting.batch, layout.kv_heads, layout.head_dim, dtype=torch.bfloat16)
    with torch.inference_mode():
        for round_ in range(setting.rounds + 1):
            for number, remote in kinds.items():
                step = remote.begin(batch, CALL_S, IterationTiming())
                for layer in range(layout.layers):
                    step.timing = IterationTiming()
                    new = NewRows(layer, Queries(plain=q), k, v)
                    began_s = time.monotonic()
                    remote.ask(step, new)
                    remote.collect(step, new)
                    seconds = time.monotonic() - began_s
                    remote.settle(step)
                    for error in step.lost.values():
                        raise error
                    if round_:
                        samples[number].append(_Sample(seconds, step.timing.pool_s, batch.messages))
                remote.end(step)
                for sequence in sequences:
                    sequence.append(1)
                batch.step()
    return samples


def _rows(mbytes_s: float, samples: dict[int, list[_Sample]], setting: Setting) -> list[Row]:
    """Hidden: of what messages of one mini-batch take beside attention, what several save."""
    layer_s = {number: p50([one.seconds for one in some]) for number, some in samples.items()}
    attention_s = p50([one.attention_s for one in samples[1]])
    messages_s = max(layer_s[1] - attention_s, 1e-9)
    return [
        {
            "MB/s": f"{mbytes_s:g}" if mbytes_s else "TCP",
            "mini-batches": f"auto: {samples[AUTO][-1].mini_batches}" if number == AUTO else str(number),
            "a layer": seconds * 1e3,
            "attention": p50([one.attention_s for one in samples[number]]) * 1e3,
            "messages, one mini-batch": messages_s * 1e3,
            "hidden %": 100 * (layer_s[1] - seconds) / messages_s,
        }
        for number, seconds in layer_s.items()
    ]


def _draw(path: Path, report: Report) -> None:
    links = dict.fromkeys(str(row["MB/s"]) for row in report.rows)
    groups = [
        (
            "TCP on one host" if link == "TCP" else f"{link} MB/s",
            [(str(row["mini-batches"]), float(row["a layer"])) for row in report.rows if row["MB/s"] == link],
        )
        for link in links
    ]
    panels(path, report.title, groups, "ms")
