"""One replica of `kvcommons bench rotation`, a process: an engine whose sequences' KV lies on pools, and the
data plane on which its peers ask for slices. Commands and answers are lines of JSON."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.holders import CALL_S, decoded, fill
from benchmarks.replacing import Replacing
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.engine.callbacks import SequenceUpdate
from kvcommons.engine.core import Core, load_core
from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.engine.scheduler import Scheduler
from kvcommons.engine.sequence import RemoteRun
from kvcommons.engine.settings import EngineSettings
from kvcommons.errors import UnsupportedParameter
from kvcommons.holder.allowance import new_allowance
from kvcommons.holder.budget import AttentionBudget
from kvcommons.holder.client import RemoteHolder
from kvcommons.pb import common_pb2, data_pb2
from kvcommons.rpc.dialer import Dialer
from kvcommons.transport.base import Observation
from kvcommons.transport.server import DataServer, Exchange, Handler
from services.decode.batching.engine import decode_engine
from services.decode.staggering.lanes import Mode
from services.decode.staggering.rotation import Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """What a replica is made of."""

    model: str
    threads: int
    block_tokens: int
    number: int
    replicas: list[str]
    pools: list[list[str]]  # control and data addresses
    sequences: int  # that it has KV for
    context: int
    answer: int

    @property
    def blocks(self) -> int:
        """Of a sequence, its answer included."""
        return -(-(self.context + self.answer + 1) // self.block_tokens)


class Replica(Replacing):
    """The engine's EngineCallbacks and its metrics, too. `take` is one turn of it."""

    def __init__(self, child: Child, core: Core, runs: list[RemoteRun]) -> None:
        super().__init__()
        self._child = child
        self._core = core
        self._runs = runs
        self._keys = itertools.count(1)
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()  # of `_counts`
        self._handler: Handler = _refuse
        self._server = DataServer(child.replicas[child.number], self._handle, name="bench")
        self._server.start()

    def close(self) -> None:
        self._server.stop()

    def _handle(self, asked: data_pb2.DataRequest, exchange: Exchange) -> None:
        self._handler(asked, exchange)

    def observe(self, seen: Observation) -> None:
        """Of holders' and peers' answers."""
        if self._counting:
            with self._lock:
                self._counts[f"{seen.op} bytes"] += seen.sent_bytes + seen.received_bytes

    def begin(self, mode: Mode, sequences: int) -> None:
        child, core = self._child, self._core
        budget = AttentionBudget(CALL_S, new_allowance(core.backend.attention.native_exchange))
        self._rotation = Rotation(
            mode, child.replicas, core, budget, self, deadline_s=CALL_S, dialer=Dialer(observer=self.observe)
        )
        self._rotation.join(child.replicas[child.number])
        self._handler = self._rotation.handler(_refuse)
        self._rotation.start()
        self._saver = BlockSaver("bench", buffer_bytes=1 << 20)
        self._keeper = BlockKeeper(core, self._saver)
        self._engine = decode_engine(
            core, scheduler=Scheduler(max_batch=max(sequences, 1)), may_borrow=False,
            attend_deadline_s=CALL_S, budget=budget, keeper=self._keeper, callbacks=self,
            metrics=self, rotation=self._rotation,
        )  # fmt: skip
        self._free, self._stopping = self._runs[:sequences], False
        for number in range(sequences):  # they end one after another, not all at once
            self._add(child.context + number * child.answer // sequences)
        self._engine.start()

    def count(self, seconds: float) -> dict[str, float]:
        self._counts.clear()
        self._tokens = 0
        began_s, cpu_s, self._counting = time.monotonic(), time.process_time(), True
        time.sleep(seconds)
        self._counting = False
        self._counts["tokens"] = self._tokens
        self._counts["seconds"] = time.monotonic() - began_s
        self._counts["cpu_s"] = time.process_time() - cpu_s
        return dict(self._counts)

    def end(self) -> None:
        self._stopping = True
        self._engine.stop(CALL_S)
        self._rotation.close(CALL_S)
        self._keeper.close()

    def _add(self, tokens: int) -> None:
        key, known, child = next(self._keys), self._free.pop(0), self._child
        run = RemoteRun(first_block=0, count=known.count, holder=known.holder, ref=known.ref)
        end = child.context + child.answer
        self._engine.add(decoded(self._core, key, tokens, end, [run]))
        self._engine.begin(key, common_pb2.SampledToken(token=1))

    # Beside Replacing's, on the engine's thread.

    def _replace(self) -> None:
        self._add(self._child.context)

    def iteration(self, batch: int, timing: IterationTiming) -> None:
        if self._counting:
            with self._lock:
                self._counts["iterations"] += 1
                for name, value in {**timing.parts, "away": timing.away, "stood_in": timing.stood_in}.items():
                    self._counts[name] += value

    def verified(self, drafted: int, accepted: int) -> None:
        """Nothing is drafted."""

    def ended(self, step: SequenceUpdate) -> None:
        """Its sequence is replaced."""

    def for_peer(self) -> None:
        """The peer counts it."""


def _refuse(request: data_pb2.DataRequest, exchange: Exchange) -> None:
    raise UnsupportedParameter("this process answers its peers only", param="op")


async def _borrow(child: Child, core: Core, replica: Replica, runs: list[RemoteRun]) -> list[RemoteHolder]:
    """One sequence after another from one pool and the next."""
    holders = [
        RemoteHolder(
            control, data, owner=f"replica-{child.number}", model=core.info.fingerprint,
            lost=lambda refs: None, dialer=Dialer(observer=replica.observe),
        )
        for control, data in child.pools
    ]  # fmt: skip
    for holder in holders:
        holder.start()
    for number in range(child.sequences):
        holder = holders[number % len(holders)]
        name = f"{child.number}-{number}"
        ref = await holder.reserve(name, child.blocks, first_position=0, timeout_s=CALL_S)
        await asyncio.to_thread(fill, core, holder, ref, child.blocks)
        runs.append(RemoteRun(first_block=0, count=child.blocks, holder=holder, ref=ref))
    return holders


async def _serve(child: Child) -> None:
    core = await asyncio.to_thread(
        load_core,
        EngineSettings(
            model=child.model,
            threads=child.threads,
            block_tokens=child.block_tokens,
            capacity_tokens=child.blocks * child.block_tokens,
        ),
    )
    await asyncio.to_thread(core.memory.tensor.normal_)
    runs: list[RemoteRun] = []
    replica = Replica(child, core, runs)
    holders = await _borrow(child, core, replica, runs)
    _say({"ready": True})
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        if order["do"] == "begin":
            await asyncio.to_thread(replica.begin, order["mode"], order["sequences"])
            _say({})
        elif order["do"] == "count":
            _say(await asyncio.to_thread(replica.count, order["seconds"]))
        else:
            await asyncio.to_thread(replica.end)
            _say({})
    replica.close()
    for holder in holders:
        await holder.release(holder.borrowed, timeout_s=CALL_S)
        await holder.close()


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def arguments(child: Child) -> list[str]:
    """Of a process that is this replica."""
    return [sys.executable, "-m", "benchmarks.rotation_child", json.dumps(asdict(child))]


if __name__ == "__main__":
    counts = json.loads(sys.argv[1])
    asyncio.run(_serve(Child(**counts)))
