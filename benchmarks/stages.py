"""`kvcommons bench stages`: a prompt through pipeline stages (Mnemosyne, section 4.3, figures 15 and 16).

Four questions. Two stages of one thread against one process of two threads, by the time to a first token
of real stacks (`--parts wall`), and by the tokens of sequences that generate side by side, there with two
ranks of one thread, too (`generation`). What four stages would take on cores of their own: each chunk's
processor time in each stage, measured alone, and the longest path through all of them (`replay`). What
sixteen would, by the scheduler and the bookkeeping of the real first stage on a simulated clock, from what
was measured (`simulation`). Efficiency is the time of one stage over that of p stages, over p; the line's
filling counts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.plot import panels
from benchmarks.random_model import write_random_model
from benchmarks.report import Report, Row
from benchmarks.store_cost import cpu_by_process_s
from benchmarks.streams import ask, at_once, prompt
from devstack.running import RunningStack

if TYPE_CHECKING:
    from kvcommons.engine.core import Core
    from kvcommons.engine.predictor import Predictor
    from kvcommons.model.layer_ranges import LayerTimes
    from kvcommons.pb import data_pb2
    from kvcommons.transport.server import Exchange

Progress = Callable[[str], None]
StageSeconds = Callable[[range, int], float]
"""Of a chunk's positions in a stage."""

PARTS = ("wall", "generation", "replay", "simulation")
BLOCK_TOKENS = 64
FOREVER_S = 1e9
_SENDS = 30


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser("stages", help="a prompt through pipeline stages: measured, and simulated")
    parser.add_argument("--random-model", metavar="SIZE", default="246m", help="random weights")
    parser.add_argument("--prompt", type=int, default=8192, metavar="N", help="tokens")
    parser.add_argument("--chunk", type=int, default=256, metavar="N", help="tokens")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--stages", type=int, default=4, metavar="N", help="of the replay")
    parser.add_argument("--simulated-stages", type=int, default=16, metavar="N")
    parser.add_argument("--simulated-prompt", type=int, default=65536, metavar="N", help="tokens")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="sequences that generate")
    parser.add_argument("--answer", type=int, default=64, metavar="N", help="tokens of each")
    parser.add_argument("--context", type=int, default=512, metavar="N", help="tokens before them")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    ratios: dict[str, float] = {}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvc-") as name:
        folder = Path(name)
        model = write_random_model(folder, options.random_model, progress)
        if "wall" in options.parts:
            _wall(folder, model, options, progress, ratios, rows)
        if "generation" in options.parts:
            _generation(folder, model, options, progress, ratios, rows)
        if {"replay", "simulation"} & set(options.parts):
            _measured(folder, model, options, progress, ratios, rows)
    title = f"{options.random_model}: a prompt of {options.prompt} tokens in chunks of {options.chunk}"
    return Report(title=title, ratios=ratios, rows=rows)


def _wall(
    folder: Path,
    model: Path,
    options: argparse.Namespace,
    progress: Progress,
    ratios: dict[str, float],
    rows: list[Row],
) -> None:
    """Both ways in turn; only one is asked at a time."""
    ways = {"1 process, 2 threads": (1, 2), "2 stages, 1 thread": (2, 1)}
    taken: dict[str, list[float]] = {way: [] for way in ways}
    with ExitStack() as running:
        progress("starting two stacks")
        stacks = {}
        for number, (way, (stages, threads)) in enumerate(ways.items()):
            capacity = 2 * options.prompt + 4 * BLOCK_TOKENS
            engine = {"block_tokens": BLOCK_TOKENS, "capacity_tokens": capacity}
            tables = {
                "prefill": {**engine, "threads": threads, "chunk_tokens": options.chunk},
                "decode": {**engine, "max_local_prefill_tokens": 0},
            }
            stacks[way] = running.enter_context(
                RunningStack(
                    folder / f"stack-{number}", tables=tables | {"up": {"core_lock": False}},
                    model=str(model), attention_pool=0, stages=stages,
                )
            )  # fmt: skip
        for round_ in range(options.rounds + 1):  # the first one warms up
            progress(f"round {round_ + 1} of {options.rounds + 1}")
            order = list(ways) if round_ % 2 else list(ways)[::-1]
            for way in order:
                first_s = ask(stacks[way].client, prompt(round_, options.prompt), 1).first_s
                if round_:
                    taken[way].append(first_s)
    alone, staged = taken.values()
    ratios["two stages over one process, time to first token"] = statistics.median(
        [two / one for one, two in zip(alone, staged, strict=True)]
    )
    rows += [
        {"what": "first token", "way": way, "seconds": statistics.median(some)} for way, some in taken.items()
    ]


def _generation(
    folder: Path,
    model: Path,
    options: argparse.Namespace,
    progress: Progress,
    ratios: dict[str, float],
    rows: list[Row],
) -> None:
    """Sequences that generate side by side: decode as one process of two threads, as two stages of one, and
    as two ranks of one, in turn."""
    alone = "decode, 2 threads"
    divided = {"two stages": "2 stages of decode, 1 thread", "two ranks": "2 ranks of decode, 1 thread"}
    shapes = [(1, 1, 2), (2, 1, 1), (1, 2, 1)]  # stages, ranks of each, threads
    ways = dict(zip([alone, *divided.values()], shapes, strict=True))
    rates: dict[str, list[float]] = {way: [] for way in ways}
    gaps: dict[str, list[float]] = {way: [] for way in ways}
    used = {way: defaultdict[str, float](float) for way in ways}
    with ExitStack() as running:
        progress("starting stacks that generate")
        capacity = options.batch * (options.context + options.answer + 2 * BLOCK_TOKENS)
        engine = {"block_tokens": BLOCK_TOKENS, "capacity_tokens": capacity}
        stacks = {}
        for number, (way, (stages, tensor, threads)) in enumerate(ways.items()):
            decode = {**engine, "threads": threads, "max_local_prefill_tokens": 0}
            stacks[way] = running.enter_context(
                RunningStack(
                    folder / f"generating-{number}",
                    tables={"prefill": engine, "decode": decode, "up": {"core_lock": False}},
                    model=str(model), attention_pool=0, decode_stages=stages, decode_tensor=tensor,
                )
            )  # fmt: skip
        for round_ in range(options.rounds + 1):  # the first one warms up
            progress(f"generation, round {round_ + 1} of {options.rounds + 1}")
            for way in list(ways)[:: 1 if round_ % 2 else -1]:
                prompts = [prompt(1000 * round_ + one, options.context) for one in range(options.batch)]
                at_once(stacks[way].client, prompts, 1)  # their history is found from here on
                before = cpu_by_process_s(stacks[way])
                answers = at_once(stacks[way].client, prompts, options.answer)
                if round_:
                    began_s = max(answer.times_s[0] for answer in answers)  # all generate from here on
                    ended_s = min(answer.times_s[-1] for answer in answers)
                    times_s = [one for answer in answers for one in answer.times_s]
                    meanwhile = sum(began_s < one <= ended_s for one in times_s)
                    generated = len(times_s)
                    rates[way].append(meanwhile / max(ended_s - began_s, 1e-9))
                    gaps[way] += [gap for answer in answers for gap in answer.gaps_s()]
                    for name, seconds in cpu_by_process_s(stacks[way]).items():
                        if name.startswith("decode"):
                            used[way][name] += (seconds - before[name]) / generated
    for shape, way in divided.items():
        ratios[f"{shape} of decode over one process, tokens/s"] = statistics.median(
            [two / one for one, two in zip(rates[alone], rates[way], strict=True)]
        )
        ratios[f"{shape} of decode over one process, between tokens"] = statistics.median(
            gaps[way]
        ) / statistics.median(gaps[alone])
    for way in ways:
        rows.append({"what": "between tokens", "way": way, "seconds": statistics.median(gaps[way])})
        rows.append({"what": "1 / tokens a second", "way": way, "seconds": 1 / statistics.median(rates[way])})
        rows += [
            {"what": f"processor time a token, {name}", "way": way, "seconds": seconds / options.rounds}
            for name, seconds in sorted(used[way].items())
        ]


def _measured(
    folder: Path,
    model: Path,
    options: argparse.Namespace,
    progress: Progress,
    ratios: dict[str, float],
    rows: list[Row],
) -> None:
    from kvcommons.engine.core import load_core
    from kvcommons.engine.iteration_costs import IterationWork
    from kvcommons.engine.predictor import Predictor
    from kvcommons.engine.settings import EngineSettings
    from kvcommons.model.layer_ranges import LayerTimes

    settings = EngineSettings(
        model=str(model), block_tokens=BLOCK_TOKENS, capacity_tokens=options.prompt + 2 * BLOCK_TOKENS
    )
    chunks = [
        range(first, min(first + options.chunk, options.prompt))
        for first in range(0, options.prompt, options.chunk)
    ]
    progress("loading the model as one, and as stages")
    whole = load_core(settings)
    spec, send_s = whole.model.spec, send_seconds(folder, options.chunk, whole)
    alone_s = _processor_seconds([whole], chunks, options.rounds, progress)
    one_s = sum(seconds[0] for seconds in alone_s)
    if "replay" in options.parts:
        ranges = LayerTimes.estimate(spec, rows=options.chunk, sampled=1, context=options.prompt // 2).divide(
            options.stages
        )
        cores = [load_core(settings, layers) for layers in ranges]
        staged_s = _processor_seconds(cores, chunks, options.rounds, progress)
        pipeline_s = pipeline_seconds(staged_s, send_s)
        ratios[f"efficiency of {options.stages} stages, replayed"] = one_s / (options.stages * pipeline_s)
        rows += [
            {
                "what": f"stage {number}, layers {layers.start} … {layers.stop - 1}",
                "way": "processor time of all chunks",
                "seconds": sum(seconds[number] for seconds in staged_s),
            }
            for number, layers in enumerate(ranges)
        ]
        rows.append({"what": f"{options.stages} stages", "way": "critical path", "seconds": pipeline_s})
    rows.append({"what": "one stage", "way": "processor time of all chunks", "seconds": one_s})
    rows.append({"what": "activations of a chunk", "way": "sent and received", "seconds": send_s})
    if "simulation" in options.parts:
        predictor = Predictor()
        for _ in range(4):
            for chunk, (seconds,) in zip(chunks, alone_s, strict=True):
                predictor.learn(IterationWork.of_chunk(chunk), seconds)
        times = LayerTimes.estimate(
            spec, rows=options.chunk, sampled=1, context=options.simulated_prompt // 2
        )
        _simulate(options, predictor, times, send_s, ratios, rows)


def _processor_seconds(
    cores: Sequence[Core], chunks: Sequence[range], rounds: int, progress: Progress
) -> list[list[float]]:
    """Of each chunk in each stage, one after the other on one thread: the median of rounds."""
    import torch

    from kvcommons.engine.chunk_rows import InnerChunk
    from kvcommons.stages.iteration import StageIteration

    blocks = [core.allocator.allocate(core.layout.blocks_of(chunks[-1].stop)) for core in cores]
    taken: list[list[list[float]]] = [[[] for _ in cores] for _ in chunks]
    with torch.inference_mode():
        for round_ in range(rounds):
            progress(f"{len(cores)} stages, round {round_ + 1} of {rounds}")
            for chunk, seconds in zip(chunks, taken, strict=True):
                entering = None
                for core, some, mine in zip(cores, blocks, seconds, strict=True):
                    rows = InnerChunk(core, chunk, some)
                    iteration = StageIteration(core, [rows], entering)
                    began_s = time.process_time()
                    iteration.run()
                    mine.append(time.process_time() - began_s)
                    for error in iteration.failures.values():
                        raise error
                    entering = iteration.leaving
    for core, some in zip(cores, blocks, strict=True):
        core.allocator.release(some)
    return [[statistics.median(mine) for mine in seconds] for seconds in taken]


def pipeline_seconds(staged_s: Sequence[Sequence[float]], send_s: float) -> float:
    """The longest path through chunks (rows) and stages (columns) that each have a processor of their own: a
    chunk waits for its stage's last one, and for itself to come."""
    free_s = [0.0] * len(staged_s[0])
    for seconds in staged_s:
        arrived_s = 0.0
        for stage, mine in enumerate(seconds):
            free_s[stage] = max(free_s[stage], arrived_s) + mine
            arrived_s = free_s[stage] + send_s
    return free_s[-1]


def send_seconds(folder: Path, rows: int, core: Core) -> float:
    """What a chunk's activations take to another thread's memory, the median of some."""
    import torch

    from kvcommons.backend.memory import byte_view
    from kvcommons.stages.link import StageLink
    from kvcommons.transport.server import DataServer

    arrived = threading.Semaphore(0)
    hidden = torch.zeros((rows, core.model.spec.hidden), dtype=core.model.dtype)
    into = torch.empty_like(hidden)

    def take(request: data_pb2.DataRequest, exchange: Exchange) -> None:
        exchange.one_way = True
        exchange.receive_payload([byte_view(into)])
        arrived.release()

    server = DataServer(f"shm:{folder}/link", take, name="stage")
    server.start()
    link, taken = StageLink(server.address, 1), []
    try:
        for _ in range(_SENDS):
            began_s = time.monotonic()
            link.send([], [], hidden, iteration=True)
            arrived.acquire(timeout=10.0)
            taken.append(time.monotonic() - began_s)
    finally:
        link.close()
        server.stop()
    return statistics.median(taken)


def _simulate(
    options: argparse.Namespace,
    predictor: Predictor,
    times: LayerTimes,
    send_s: float,
    ratios: dict[str, float],
    rows: list[Row],
) -> None:
    from kvcommons.engine.iteration_costs import IterationWork

    layers = len(times.layers)
    whole = times.of(range(layers))

    def pipeline_s(stages: int) -> float:
        """The first layers take as long as each other, the last one nearly nothing: what of it a chunk's rows
        do not need is not computed."""
        shares = [times.of(some) / whole for some in times.divide(stages)]

        def seconds(chunk: range, stage: int) -> float:
            return predictor.seconds(IterationWork.of_chunk(chunk)) * shares[stage]

        return simulated_seconds([options.simulated_prompt], stages, options.chunk, seconds, send_s)

    one_s = pipeline_s(1)
    stages = 1
    while stages <= min(options.simulated_stages, layers):
        taken_s = pipeline_s(stages)
        ratios[f"efficiency of {stages} stages, simulated"] = one_s / (stages * taken_s)
        rows.append(
            {
                "what": f"{stages} stages",
                "way": f"simulated, {options.simulated_prompt} tokens",
                "seconds": taken_s,
            }
        )
        stages *= 2


def simulated_seconds(
    prompts: Sequence[int], stages: int, chunk_tokens: int, seconds: StageSeconds, send_s: float
) -> float:
    """Until all prompts have left the line: the first stage's own scheduler and bookkeeping, on a simulated
    clock."""
    from kvcommons.engine.scheduler import Scheduler
    from kvcommons.stages.outstanding import OutstandingWork

    scheduler = Scheduler(max_queue=len(prompts), max_prompts=len(prompts))
    outstanding = OutstandingWork[None](range(1, stages), iterations_max=stages)
    computed = [0] * len(prompts)
    for key, tokens in enumerate(prompts):
        scheduler.submit(key, tokens=tokens, deadline_s=FOREVER_S)
        scheduler.admit(key, tokens_left=tokens)
    free_s, now_s, leaving = [0.0] * stages, 0.0, deque[float]()
    while sum(computed) < sum(prompts):
        if stages > 1 and outstanding.full:
            now_s = max(now_s, leaving[0])
        while leaving and leaving[0] <= now_s:
            leaving.popleft()
            outstanding.done(1)
        chunks = []
        for key, tokens in scheduler.spans(lambda key: True, chunk_tokens):
            chunks.append(range(computed[key], computed[key] + tokens))
            computed[key] += tokens
            scheduler.progress(key, tokens_left=prompts[key] - computed[key])
        arrived_s = now_s
        for stage in range(stages):
            free_s[stage] = max(free_s[stage], arrived_s) + sum(seconds(chunk, stage) for chunk in chunks)
            arrived_s = free_s[stage] + send_s
        now_s = free_s[0]
        if stages > 1:
            outstanding.passed_on(now_s, None)
            leaving.append(free_s[-1] + send_s)
    return free_s[-1]


def _draw(path: Path, report: Report) -> None:
    bars = [(f"{row['what']}: {row['way']}", float(row["seconds"])) for row in report.rows]
    panels(path, report.title, [("seconds", bars)], "seconds")
