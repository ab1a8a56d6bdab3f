"""`kvcommons bench rotation`: several decode processes over one pool, each with a batch of its own, against
batches whose slices go from one replica of the model to the next.

Lamina, section 5.1: one batch at one replica, for the parts of an iteration where nobody disturbs it; fixed,
n - 1 batches over n - 1 replicas; rotational, n over n - 1; auto, what the group finds best. The kinds take
turns, with the same sequences in the last three, which end and are replaced (continuous batching), with KV
that is there already.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from benchmarks.holders import START_S, HolderProcess, attention_pools
from benchmarks.plot import stacked_bars
from benchmarks.random_model import write_random_model
from benchmarks.report import Report, Row

Progress = Callable[[str], None]
BLOCK_TOKENS = 64
WARM_S = 1.0
ANSWER_S = 120.0  # for a replica's answer to a command
KINDS = {"one batch": "off", "fixed": "off", "rotational": "on", "auto": "auto"}
PARTS = ("slices", "slices elsewhere", "activations", "attention", "network", "waiting", "rest")


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(
        "rotation", help="batches that go round several decode processes, against one batch at each"
    )
    parser.add_argument("--random-model", metavar="SIZE", default="34m", help="random weights: 34m or 246m")
    parser.add_argument("--replicas", type=int, default=2, metavar="N", help="decode processes")
    parser.add_argument("--sequences", type=int, default=24, metavar="N", help="of all of them together")
    parser.add_argument("--context", type=int, default=512, metavar="N")
    parser.add_argument("--answer", type=int, default=128, metavar="N", help="tokens of each sequence")
    parser.add_argument("--pools", type=int, default=2, metavar="N")
    parser.add_argument("--rounds", type=int, default=2, metavar="N")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="of each kind in a round")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of each process")
    parser.add_argument("--transport", choices=("shm", "unix"), default="shm")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    with tempfile.TemporaryDirectory(prefix="kvc-") as name:
        model = write_random_model(Path(name), options.random_model, progress)
        rows = asyncio.run(_measure(Path(name), model, options, progress))
    rates = {row["how"]: float(row["tokens/s"]) for row in rows}
    return Report(
        title=f"{options.random_model}: {options.sequences} sequences of {options.context} tokens over "
        f"{options.replicas} decode processes and {options.pools} pools; ms of an iteration",
        ratios={f"{kind}_over_fixed": rates[kind] / rates["fixed"] for kind in ("rotational", "auto")},
        rows=rows,
    )


def shares(kind: str, sequences: int, replicas: int) -> list[int]:
    """Sequences of each replica: batches are alike, and the first of a rotation has two."""
    batches = replicas + 1 if kind == "rotational" else replicas
    each, left = divmod(sequences, batches)
    of_batches = [each + (number < left) for number in range(batches)]
    if kind == "one batch":
        return [of_batches[0], *[0] * (replicas - 1)]
    if kind == "rotational":
        of_batches[0] += of_batches.pop()
    return of_batches


async def _measure(folder: Path, model: Path, options: argparse.Namespace, progress: Progress) -> list[Row]:
    from benchmarks.rotation_child import Child
    from kvcommons.engine.core import load_core
    from kvcommons.engine.settings import EngineSettings

    replicas, kinds = options.replicas, {kind: _Kind(kind, options) for kind in KINDS}
    most = [max(kind.shares[number] for kind in kinds.values()) for number in range(replicas)]
    core = await asyncio.to_thread(
        load_core,
        EngineSettings(model=str(model), block_tokens=BLOCK_TOKENS, capacity_tokens=BLOCK_TOKENS),
    )
    capacity = -(-(options.context + options.answer + 1) // BLOCK_TOKENS)
    addresses = [f"{options.transport}:{folder}/replica-{number}-data" for number in range(replicas)]
    async with AsyncExitStack() as stack:
        progress("starting pools and replicas")
        pools: Sequence[HolderProcess] = await stack.enter_async_context(
            attention_pools(
                folder, model, core, count=options.pools, transport=options.transport,
                capacity_tokens=(sum(most) + replicas) * capacity * BLOCK_TOKENS,
            )
        )  # fmt: skip
        del core
        children = [
            Child(
                model=str(model), threads=options.threads, block_tokens=BLOCK_TOKENS, number=number,
                replicas=addresses, sequences=most[number], context=options.context, answer=options.answer,
                pools=[[pool.holder.control_address, pool.holder.data_address] for pool in pools],
            )
            for number in range(replicas)
        ]  # fmt: skip
        processes = [await stack.enter_async_context(_Process(child)) for child in children]
        await asyncio.gather(*(process.answer() for process in processes))
        for round_ in range(options.rounds):
            for kind in kinds.values():
                progress(f"{kind.name}, {round_ + 1} of {options.rounds}")
                await kind.take(processes, options.seconds)
    return [kind.row() for kind in kinds.values()]


class _Process:
    """A replica, from this side; ends with the context."""

    def __init__(self, child: Any) -> None:
        self._child = child

    async def __aenter__(self) -> _Process:
        from benchmarks.rotation_child import arguments

        self._process = await asyncio.create_subprocess_exec(
            *arguments(self._child), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), START_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), ANSWER_S)
        answer: dict[str, float] = json.loads(line)
        return answer

    async def tell(self, **order: Any) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        return await self.answer()


class _Kind:
    """One way to run the sequences, and what was counted of it."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.shares = shares(name, options.sequences, options.replicas)
        self._batches = options.replicas + 1 if name == "rotational" else sum(map(bool, self.shares))
        self._counts: Counter[str] = Counter()

    async def take(self, processes: Sequence[_Process], seconds: float) -> None:
        """One turn."""
        mode = KINDS[self.name]
        both = zip(processes, self.shares, strict=True)
        await asyncio.gather(*(one.tell(do="begin", mode=mode, sequences=share) for one, share in both))
        await asyncio.sleep(WARM_S)
        for counts in await asyncio.gather(*(one.tell(do="count", seconds=seconds) for one in processes)):
            self._counts.update(counts)
        await asyncio.gather(*(one.tell(do="end") for one in processes))

    def row(self) -> dict[str, str | float | int]:
        counts, replicas = self._counts, len(self.shares)
        iterations, tokens = max(counts["iterations"], 1), max(counts["tokens"], 1)
        return {
            "how": self.name,
            "batches": self._batches,
            "sequences": sum(self.shares),
            "tokens/s": tokens / (counts["seconds"] / replicas),
            **{f"{part} ms": counts[part] / iterations * 1e3 for part in PARTS},
            "slices elsewhere": counts["away"] / iterations,
            "stood in": counts["stood_in"] / iterations,
            "activations KiB/token": counts["compute_slice bytes"] / tokens / 1024,
            "attention KiB/token": counts["attend_layer bytes"] / tokens / 1024,
            "decode CPU ms/token": counts["cpu_s"] / tokens * 1e3,
        }


def _draw(path: Path, report: Report) -> None:
    rows = [{**row, "what": f"{row['how']} ({row['batches']})"} for row in report.rows]
    axis = "ms of an iteration of a batch"
    stacked_bars(path, report.title, rows, [f"{part} ms" for part in PARTS], "what", axis, " ms")
