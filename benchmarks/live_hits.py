"""`kvcommons bench live-hits`: what a real kvstore finds under its eviction policies, beside the replay.

One trace of chat sessions whose queue is full (replay/sharegpt.py) is served turn by turn against a kvstore
process: the queue is hinted by the router's own class, the prompt's leading blocks are read, the others are
made and sent, all over the calls that router and prefill use. Blocks are of one page, for it is which of them
are there that counts."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import grpc

from benchmarks.kvstore_child import KvstoreChild
from benchmarks.plot import panels
from benchmarks.replay.hierarchy import Capacity
from benchmarks.replay.replay import Setting, replay
from benchmarks.replay.sharegpt import ShareGpt, generate
from benchmarks.replay.trace import Job, Trace
from benchmarks.report import Report
from kvcommons.errors import DeadlineExceeded
from kvcommons.pb import data_pb2, kvstore_pb2, kvstore_pb2_grpc
from kvcommons.rblock.checksum import checksum
from kvcommons.transport.client import DataClient
from kvcommons.transport.deadline import Deadline
from services.kvstore.policies.catalogue import CATALOGUE
from services.kvstore.tier import PAGE_BYTES
from services.router.admission.hints import StoreHints, WaitingRequest
from services.router.admission.queue import Prefix

MODEL = b"live-hits".ljust(32, b".")
CALL_S = 30.0
HINT_TTL_S = 60.0
PUT_BLOCKS = 64  # of one message; DRAM has to have room for what is under way
Progress = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class Found:
    """Blocks, of the turns that count."""

    asked: int = 0
    dram: int = 0
    disk: int = 0

    @property
    def hit_rate(self) -> float:
        return (self.dram + self.disk) / max(self.asked, 1)

    @property
    def dram_share(self) -> float:
        return self.dram / max(self.dram + self.disk, 1)


class Serving:
    """One kvstore under one policy, and the queue in front of it."""

    def __init__(self, store: KvstoreChild, *, jobs_max: int) -> None:
        """`jobs_max`: of how many of the next jobs the store gets hints; 0: none."""
        self._jobs_max = jobs_max
        self._channel = grpc.insecure_channel(store.control_address)
        self._blocks = kvstore_pb2_grpc.BlocksStub(self._channel)
        self._data = DataClient(store.data_address)
        self._hints = StoreHints()
        self._waiting: deque[tuple[int, Job]] = deque()

    def close(self) -> None:
        self._data.close()
        self._channel.close()

    def run(self, trace: Trace, *, warm_up: int, turn_s: float, progress: Progress) -> Found:
        found = Found()
        arrived = 0
        for number, job in enumerate(trace.jobs):
            while arrived < len(trace.jobs) and trace.jobs[arrived].arrive_s <= job.start_s:
                self._waiting.append((arrived + 1, trace.jobs[arrived]))
                arrived += 1
            until_s = time.monotonic() + turn_s
            ids = identities(job.run)
            self._waiting.popleft()
            dram, disk = self._serve(ids)
            if number >= warm_up:
                found.asked, found.dram, found.disk = (
                    found.asked + len(ids),
                    found.dram + dram,
                    found.disk + disk,
                )
            self._hint(job.start_s)
            time.sleep(max(0.0, until_s - time.monotonic()))
            if number % 50 == 0:
                progress(f"{number} of {len(trace.jobs)} turns, {len(self._waiting)} wait")
        return found

    def _hint(self, now_s: float) -> None:
        if not self._jobs_max:
            return
        waiting = [
            WaitingRequest(
                number, Prefix(model=MODEL, block_ids=identities(job.run)), max(job.start_s - now_s, 0.0)
            )
            for number, job in list(self._waiting)[: self._jobs_max]
            if job.run
        ]
        hint = self._hints.next("router", waiting, HINT_TTL_S)
        self._hints.answered(hint, self._blocks.Hint(hint, timeout=CALL_S))

    def _serve(self, ids: Sequence[bytes]) -> tuple[int, int]:
        """A turn as prefill computes it; its hits in DRAM and on disk."""
        if not ids:
            return 0, 0
        tiers = self._blocks.Match(kvstore_pb2.MatchRequest(model=MODEL, block_ids=ids), timeout=CALL_S).tiers
        dram = sum(tier == kvstore_pb2.TIER_DRAM for tier in tiers)
        if tiers:
            self._read(ids[: len(tiers)])
        for start in range(len(tiers), len(ids), PUT_BLOCKS):
            self._put(ids, start)
        if len(tiers) < len(ids):
            give_up_s = time.monotonic() + CALL_S
            while self._blocks.Stats(kvstore_pb2.StatsRequest(), timeout=CALL_S).pending_writes:
                if time.monotonic() > give_up_s:
                    raise DeadlineExceeded(f"the kvstore wrote nothing to disk for {CALL_S:g} s")
                time.sleep(0.002)
        return dram, len(tiers) - dram

    def _read(self, ids: Sequence[bytes]) -> None:
        get = data_pb2.GetLayers(model=MODEL, block_ids=ids, first_layer=0, layers=1)
        capacity = bytearray(len(ids) * PAGE_BYTES)
        replies = self._data.stream(
            data_pb2.DataRequest(get_layers=get),
            into=lambda _, size: [memoryview(capacity)[:size]],
            replies=1,
            deadline=Deadline.after(CALL_S),
        )
        for _ in replies:
            pass

    def _put(self, ids: Sequence[bytes], start: int) -> None:
        part = ids[start : start + PUT_BLOCKS]
        pages = [block_id.ljust(PAGE_BYTES, b"\0") for block_id in part]
        put = data_pb2.PutLayer(
            model=MODEL,
            tenant="tenant",
            writer="bench",
            layer=0,
            layers=1,
            parent=ids[start - 1] if start else b"",
            first_block=start,
            block_ids=part,
            checksums=[checksum(block_id, 0, page) for block_id, page in zip(part, pages, strict=True)],
        )
        self._data.call(data_pb2.DataRequest(put_layer=put), pages, deadline=Deadline.after(CALL_S))


def identities(run: Sequence[int]) -> list[bytes]:
    return [blake2b(block.to_bytes(8, "big"), digest_size=32).digest() for block in run]


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(
        "live-hits", help="what a real kvstore finds by eviction policy, beside the replay"
    )
    parser.add_argument("--policy", nargs="+", default=["lru", "scheduler-aware"], choices=list(CATALOGUE))
    parser.add_argument("--sessions", type=int, default=300, metavar="N")
    parser.add_argument("--warm-up", type=int, default=540, metavar="N", help="turns that are not counted")
    parser.add_argument("--dram-blocks", type=int, default=600, metavar="N")
    parser.add_argument("--disk-blocks", type=int, default=6000, metavar="N")
    parser.add_argument(
        "--look-ahead", type=int, default=1024, metavar="N", help="jobs that are hinted at most"
    )
    parser.add_argument("--block-tokens", type=int, default=64, metavar="N")
    parser.add_argument(
        "--turn-ms", type=float, default=10.0, metavar="MS", help="a turn takes so long at least"
    )
    parser.add_argument("--seed", type=int, default=1)
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    trace = generate(
        ShareGpt(sessions=options.sessions, block_tokens=options.block_tokens, seed=options.seed)
    )
    # Whatever is in DRAM of the live store has a copy on disk; in the replay a block is in one tier at a
    # time.
    capacity = Capacity(
        dram_blocks=options.dram_blocks, disk_blocks=options.disk_blocks - options.dram_blocks
    )
    setting = Setting(capacity=capacity, look_ahead=options.look_ahead, warm_up=options.warm_up)
    rows = []
    for policy in options.policy:
        found = _live(options, trace, policy, progress)
        replayed = replay(trace, policy, setting)
        rows.append(
            {
                "policy": policy,
                "live block hit rate": round(found.hit_rate, 4),
                "live DRAM share of hits": round(found.dram_share, 4),
                "replayed block hit rate": round(replayed.block_hit_rate, 4),
                "replayed DRAM share of hits": round(replayed.dram_share_of_hits, 4),
                "blocks asked for": found.asked,
            }
        )
    first, last = rows[0], rows[-1]
    ratios = {
        f"{kind} {last['policy']} over {first['policy']}": round(
            float(last[f"{kind} block hit rate"]) / max(float(first[f"{kind} block hit rate"]), 1e-9), 3
        )
        for kind in ("live", "replayed")
    }
    return Report(title="Block hits of a real kvstore by eviction policy", ratios=ratios, rows=rows)


def _live(options: argparse.Namespace, trace: Trace, policy: str, progress: Progress) -> Found:
    with tempfile.TemporaryDirectory(prefix="kvc-") as name:
        store = KvstoreChild(
            Path(name),
            dram_bytes=options.dram_blocks * PAGE_BYTES,
            disk_bytes=options.disk_blocks * PAGE_BYTES + 64 * PAGE_BYTES,  # and the slab files' headers
            policy=policy,
            dram_buffer=0.0,
        )
        with store:
            serving = Serving(store, jobs_max=options.look_ahead if CATALOGUE[policy].looks_ahead else 0)
            try:
                return serving.run(
                    trace,
                    warm_up=options.warm_up,
                    turn_s=options.turn_ms / 1000,
                    progress=lambda text: progress(f"{policy}: {text}"),
                )
            finally:
                serving.close()


def _draw(path: Path, report: Report) -> None:
    groups = [
        (str(row["policy"]), [(kind, float(row[f"{kind} block hit rate"])) for kind in ("live", "replayed")])
        for row in report.rows
    ]
    panels(path, report.title, groups, "share of the blocks asked for")
