"""How long does the ledger take to name creditors (Infinite-LLM, section 4.4), with many instances that send
heartbeats meanwhile? One replica's own parts on its event loop, from a request that has come in to the reply
that can go out; neither etcd nor the wire is in it."""

from __future__ import annotations

import argparse
import asyncio
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.plot import stacked_bars
from benchmarks.report import Report, p50, p99
from kvcommons.pb import common_pb2
from kvcommons.pb import ledger_pb2 as pb
from services.ledger.candidates import Candidates
from services.ledger.debts import DebtLedger
from services.ledger.etcd import Etcd
from services.ledger.feed import Feed
from services.ledger.mirror import Mirror
from services.ledger.registry import Registry
from services.ledger.server import LedgerService
from services.ledger.settlement_reports import SettlementReports

MODEL = b"m" * 32
HEARTBEAT_S = 1.0
PER_HOST = 8
TICKS = 100  # in which a heartbeat period's heartbeats come


class Instances:
    """A tenth of them full, the others with something to lend, which changes from beat to beat."""

    def __init__(self, count: int, dice: random.Random) -> None:
        self.count = count
        self._dice = dice

    def beat(self, number: int) -> pb.HeartbeatRequest:
        lendable = 0 if number % 10 == 0 else self._dice.randint(1, 400)
        return pb.HeartbeatRequest(
            instance=pb.Instance(
                id=f"decode-{number}",
                service="decode",
                control_address=f"host-{number // PER_HOST}:7000",
                data_address=f"tcp:host-{number // PER_HOST}:7001",
                host=f"host-{number // PER_HOST}",
                model=common_pb2.ModelInfo(name="m", fingerprint=MODEL),
                load=pb.Load(
                    total_blocks=1000,
                    free_blocks=lendable,
                    lendable_blocks=lendable,
                    debts={f"decode-{number + 1}": 3} if number % 10 == 0 else {},
                    loans={f"decode-{number - 1}": 3} if number % 10 == 1 else {},
                    ready=True,
                ),
                started_ms=1,
            )
        )

    def ask(self) -> pb.CandidatesRequest:
        number = self._dice.randrange(self.count)
        return pb.CandidatesRequest(
            debtor=f"decode-{number}",
            host=f"host-{number // PER_HOST}",
            model=MODEL,
            blocks=self._dice.randint(1, 64),
        )


class OverSocket:
    """The context of a call that shows no certificate."""

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}


async def measure(count: int, *, seconds: float, asked_per_s: float, seed: int) -> tuple[list[float], int]:
    """Milliseconds of each request, and how many were named nobody."""
    registry = Registry(lease_s=5.0, heartbeat_s=HEARTBEAT_S)
    candidates, debts = Candidates(random.Random(seed)), DebtLedger()
    feed = Feed(registry, refreshed=lambda: candidates.follow(registry.instances))
    mirror = Mirror(Etcd(["localhost:1"], timeout_s=1), registry, prefix="/", lease_s=5, changed=feed.touch)
    service = LedgerService(
        registry, mirror, feed, candidates, debts, SettlementReports(), heartbeat_ms=1000, lease_s=5.0
    )
    instances = Instances(count, random.Random(seed))
    for number in range(count):
        await service.Heartbeat(instances.beat(number), OverSocket())
    taken_ms: list[float] = []
    empty = 0
    loop = asyncio.get_running_loop()
    stop = threading.Event()

    async def answer(request: pb.CandidatesRequest, asked: float) -> None:
        nonlocal empty
        reply = await service.Candidates(request, None)
        reply.SerializeToString()
        taken_ms.append((time.perf_counter() - asked) * 1e3)
        empty += not reply.creditors

    def ask() -> None:
        """From a thread, as requests come in from the network."""
        requests = [instances.ask() for _ in range(int(seconds * asked_per_s))]
        for request in requests:
            if stop.wait(1 / asked_per_s):
                return
            asyncio.run_coroutine_threadsafe(answer(request, time.perf_counter()), loop)

    async def beat() -> None:
        beats = [instances.beat(number) for number in range(count)]
        while True:
            for tick in range(TICKS):
                for number in range(tick, count, TICKS):
                    await service.Heartbeat(beats[number], OverSocket())
                await asyncio.sleep(HEARTBEAT_S / TICKS)
            for number in range(0, count, 7):  # what changed
                beats[number] = instances.beat(number)

    background = [asyncio.create_task(feed.run()), asyncio.create_task(beat())]
    await asyncio.sleep(0.5)  # the first view is made
    thread = threading.Thread(target=ask)
    thread.start()
    await asyncio.to_thread(thread.join)
    stop.set()
    for task in background:
        task.cancel()
    await asyncio.wait(background)
    return taken_ms, empty


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser("borrow", help="how long the ledger takes to name creditors")
    parser.add_argument("--instances", type=int, nargs="+", default=[100, 1_000], metavar="N")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="for each number")
    parser.add_argument("--asked-per-s", type=float, default=200.0, metavar="R")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _run(options: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    rows: list[dict[str, str | int | float]] = []
    for count in options.instances:
        progress(f"{count} instances")
        taken_ms, empty = asyncio.run(
            measure(count, seconds=options.seconds, asked_per_s=options.asked_per_s, seed=options.seed)
        )
        rows.append(
            {
                "instances": str(count),
                "requests": len(taken_ms),
                "named nobody": empty,
                "p50 ms": p50(taken_ms),
                "p99 ms": p99(taken_ms),
                "longest ms": max(taken_ms),
            }
        )
    last = rows[-1]
    return Report(
        title="To name creditors, inside the ledger",
        ratios={f"p99 ms with {last['instances']} instances": float(last["p99 ms"])},
        rows=rows,
    )


def _draw(path: Path, report: Report) -> None:
    stacked_bars(path, report.title, report.rows, ("p99 ms",), "instances", "milliseconds (p99)")
