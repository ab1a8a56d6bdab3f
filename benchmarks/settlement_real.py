"""The same question as `benchmarks.settlement`, asked of real processes: does throughput hold over time?

Four decode instances with a real ledger and etcd serve requests of mixed lengths; as many are always under
way, so that memory stays full and sequences grow over each other's instances. One mode after the other, with
the same requests. Throughput is given by time, and by the CPU time that all decode instances used: where
others share the machine, the latter says what a token cost.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.random_model import write_random_model
from benchmarks.report import Report
from benchmarks.scraping import metric
from benchmarks.settlement import thirds
from benchmarks.store_cost import cpu_by_process_s
from benchmarks.streams import prompt
from devstack.rest import RestClient
from devstack.running import RunningStack
from kvcommons.errors import KVCommonsError

Progress = Callable[[str], None]
BLOCK_TOKENS = 16
CALL_S = 5.0
NEVER = 1_000_000  # blocks: no circle is so large
# The settings of the ledger and of decode.
MODES: Mapping[str, tuple[int, bool]] = {
    "no settlement": (NEVER, False),
    "circles": (8, False),
    "circles and home": (8, True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RealLoad:
    """Tokens, of an instance's room and of requests."""

    instances: int = 4
    capacity: int = 2048
    at_once: int = 28  # requests under way
    short: tuple[int, int] = (64, 384)
    long: tuple[int, int] = (1024, 2560)
    long_share: float = 0.15
    answer: tuple[int, int] = (128, 768)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    tokens_s: float
    tokens_cpu_s: float
    remote: float  # share of the blocks in use that lie elsewhere


def compare(
    load: RealLoad, *, size: str, minutes: float, windows: int, modes: Sequence[str], seed: int,
    progress: Progress,
) -> Report:  # fmt: skip
    runs: dict[str, list[Window]] = {}
    failed: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="kvcommons-bench-") as name:
        folder = Path(name)
        model = write_random_model(folder, size, progress)
        for number, mode in enumerate(modes):
            progress(f"starting the stack: {mode}")
            tables = _tables(load, *MODES[mode])
            flags: dict[str, Any] = {"model": str(model), "decode": load.instances, "attention_pool": 0}
            with RunningStack(folder / f"stack-{number}", tables=tables, **flags) as stack:
                progress(f"{minutes:g} minutes: {mode}")
                clients = _Clients(stack.client, load, seed)
                runs[mode] = _watch(stack, clients, load, minutes * 60 / windows, windows)
                failed[mode] = clients.failed
    width = minutes / windows
    rows: list[dict[str, str | int | float]] = [
        {"minutes": f"{one * width:g}-{(one + 1) * width:g}"} for one in range(windows)
    ]
    for mode, of_mode in runs.items():
        for row, window in zip(rows, of_mode, strict=True):
            row[f"tokens/s, {mode}"] = window.tokens_s
            row[f"tokens/CPU s, {mode}"] = window.tokens_cpu_s
            row[f"remote %, {mode}"] = 100 * window.remote
    ratios: dict[str, float] = {}
    for mode, of_mode in runs.items():
        ratios[f"last third over first, {mode}"] = thirds([one.tokens_s for one in of_mode])
        ratios[f"the same by CPU time, {mode}"] = thirds([one.tokens_cpu_s for one in of_mode])
        ratios[f"remote %, {mode}"] = 100 * fmean(one.remote for one in of_mode)
        ratios[f"requests that failed, {mode}"] = failed[mode]
    return Report(
        title=f"{load.instances} decode instances, {minutes:g} minutes each, mixed lengths", ratios=ratios,
        rows=rows,
    )  # fmt: skip


def _tables(load: RealLoad, threshold: int, homecoming: bool) -> dict[str, dict[str, Any]]:
    shared = {"block_tokens": BLOCK_TOKENS, "threads": 1}
    return {
        "prefill": {**shared, "capacity_tokens": 4 * load.capacity, "push_deadline_s": 30.0},
        "decode": {
            **shared, "capacity_tokens": load.capacity, "lend_share": 1.0, "homecoming": homecoming,
            "attend_deadline_s": 20.0,
        },
        "ledger": {"settle_threshold_blocks": threshold},
        "router": {"max_running": load.at_once, "request_deadline_s": 600.0},
    }  # fmt: skip


class _Clients:
    """Always as many requests under way; the same ones, in the same order, for the same seed."""

    def __init__(self, client: RestClient, load: RealLoad, seed: int) -> None:
        self._client = client
        self._load = load
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self.failed = 0
        self._threads = [threading.Thread(target=self._ask_on, daemon=True) for _ in range(load.at_once)]

    def __enter__(self) -> _Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """What is under way is broken off."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(CALL_S)

    def _next(self) -> tuple[list[int], int]:
        with self._lock:
            dice, load = self._dice, self._load
            low, high = load.long if dice.random() < load.long_share else load.short
            tokens = int(low * (high / low) ** dice.random())
            return prompt(dice.randrange(1 << 30), tokens), dice.randint(*load.answer)

    def _ask_on(self) -> None:
        while not self._stopping.is_set():
            ids, answer = self._next()
            try:
                for _ in self._client.tokens(ids, max_tokens=answer, temperature=0.0, ignore_eos=True):
                    if self._stopping.is_set():
                        return
            except KVCommonsError:
                with self._lock:
                    self.failed += not self._stopping.is_set()
                self._stopping.wait(0.2)


def _watch(
    stack: RunningStack, clients: _Clients, load: RealLoad, width_s: float, windows: int
) -> list[Window]:
    names = [f"decode-{number + 1}" for number in range(load.instances)]
    found: list[Window] = []
    with clients:
        made, used_s, at_s = _made(stack, names), _cpu_s(stack, names), time.monotonic()
        for _ in range(windows):
            shares: list[float] = []
            while time.monotonic() < at_s + width_s:
                shares.append(_remote(stack, names))
                time.sleep(min(1.0, width_s / 4))
            made_now, used_now_s, now_s = _made(stack, names), _cpu_s(stack, names), time.monotonic()
            found.append(
                Window(
                    tokens_s=(made_now - made) / (now_s - at_s),
                    tokens_cpu_s=(made_now - made) / max(used_now_s - used_s, 1e-9),
                    remote=fmean(shares),
                )
            )
            made, used_s, at_s = made_now, used_now_s, now_s
    return found


def _cpu_s(stack: RunningStack, names: Sequence[str]) -> float:
    used = cpu_by_process_s(stack)
    return sum(used[name] for name in names)


def _made(stack: RunningStack, names: Sequence[str]) -> float:
    """Tokens, by the instances' own account."""
    return sum(metric(stack.runtime / f"{name}.m", "kvcommons_decode_tokens_total") for name in names)


def _remote(stack: RunningStack, names: Sequence[str]) -> float:
    import grpc

    from kvcommons.pb import holder_pb2, holder_pb2_grpc

    lent = used = 0
    for name in names:
        with grpc.insecure_channel(f"unix:{stack.runtime / name}.c") as channel:
            said = holder_pb2_grpc.HolderStub(channel).Inspect(holder_pb2.InspectRequest(), timeout=CALL_S)
        lent += said.lent_blocks
        used += said.total_blocks - said.free_blocks
    return lent / max(used, 1)
