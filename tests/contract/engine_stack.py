"""Real prefill and decode instances (kvstore and attention pool, too) on Unix sockets in one process, driven
by gRPC as a router drives them."""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from kvcommons.config import DataPlane, Node
from kvcommons.engine.iteration import Iteration
from kvcommons.engine.settings import EngineSettings
from kvcommons.errors import KVCommonsError, Unavailable
from kvcommons.model.spec import ModelSpec, fingerprint
from kvcommons.pb import (
    common_pb2,
    decode_pb2_grpc,
    holder_pb2,
    holder_pb2_grpc,
    kvstore_pb2,
    ledger_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
)
from kvcommons.pb.kvstore_pb2_grpc import BlocksStub
from kvcommons.pb.ledger_pb2_grpc import LedgerStub
from kvcommons.rpc.channel import open_channel
from kvcommons.rpc.process import Process
from kvcommons.stages.settings import StageSettings
from kvcommons.telemetry.telemetry import Telemetry
from kvcommons.telemetry.trace import Tracer
from services.attention_pool.config import AttentionPoolConfig
from services.attention_pool.service import serve as serve_pool
from services.decode.config import DecodeConfig
from services.decode.service import serve as serve_decode
from services.kvstore.__main__ import serve as serve_kvstore
from services.kvstore.config import KVStoreConfig
from services.ledger.__main__ import serve as serve_ledger
from services.ledger.config import LedgerConfig
from services.prefill.config import PrefillConfig
from services.prefill.service import serve as serve_prefill
from tests.contract.engine_turns import Reference, compute, prefill_request, turn
from tests.contract.kvstore_process import known_place
from tests.etcd import RealEtcd
from tests.machine import scaled, scaled_settings, scaled_table
from tests.waiting import eventually

BLOCK = 16
CHUNK = 32


def settings(folder: Path, **changes: Any) -> EngineSettings:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    known = {
        "dtype": "float32",
        "device": device,
        "block_tokens": BLOCK,
        "capacity_tokens": 64 * BLOCK,
        "calibrate_s": 0.0,  # an engine learns as it goes; a calibration's iterations would be slowed, too
    }
    return EngineSettings(model=str(folder), **(known | changes))


def shape_of(changes: dict[str, Any], **known: Any) -> StageSettings:
    """Takes what is of stages out of `changes`."""
    named = {field.name for field in fields(StageSettings)} & changes.keys()
    return StageSettings(**known | {name: changes.pop(name) for name in named})


CALLS = (
    "services.decode.borrowing.ledger_client.CALL_S",
    "services.decode.borrowing.loans.CALL_S",
    "services.decode.moving.mover.CALL_S",
    "services.decode.moving.mover.COPY_S",
    "kvcommons.rpc.directory.BEAT_TIMEOUT_S",
    "kvcommons.holder.client._RENEW_TIMEOUT_S",
    "kvcommons.stages.connected.JOIN_S",
    "kvcommons.stages.connected.SILENCE_S",
    "kvcommons.stages.link.SEND_S",
    "kvcommons.stages.ranks.JOIN_S",
    "kvcommons.stages.ranks.SUM_S",
    "kvcommons.stages.follower.QUIET_S",
)


def scale_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """What services wait for each other, and is no setting, is scaled as settings are."""
    for name in CALLS:
        module, _, constant = name.rpartition(".")
        monkeypatch.setattr(name, scaled(getattr(importlib.import_module(module), constant)))


class SlowIterations:
    """Those of engines in this process take longer, each by so many seconds, until that is over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, longer_s: float) -> None:
        self._longer_s = longer_s
        run = Iteration.run

        def slowly(iteration: Iteration, *between_layers: Any) -> list[list[common_pb2.SampledToken]]:
            time.sleep(self._longer_s)
            return run(iteration, *between_layers)

        monkeypatch.setattr(Iteration, "run", slowly)

    def take(self, longer_s: float) -> None:
        """Each, from now on."""
        self._longer_s = longer_s

    def over(self) -> None:
        self.take(0.0)


@contextmanager
def no_iterations() -> Iterator[None]:
    """Of engines in this process none begins an iteration meanwhile."""
    run, over = Iteration.run, threading.Event()

    def waits(self: Iteration, *between_layers: Any) -> list[list[common_pb2.SampledToken]]:
        over.wait(scaled(60))
        return run(self, *between_layers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Iteration, "run", waits)
        try:
            yield
        finally:
            over.set()


@dataclass(slots=True)
class Stack:
    """Instances by name, of one model; all end with the stack."""

    runtime: Path
    folder: Path
    reference: Reference
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)
    channels: list[Any] = field(default_factory=list)
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    etcd: RealEtcd | None = None
    transport: str = "unix"  # of the data plane: "unix", "shm" or "tcp"

    @property
    def model(self) -> bytes:
        return fingerprint(self.folder, ModelSpec.read(self.folder), "float32", BLOCK)

    def address(self, name: str) -> str:
        return f"unix:{self.runtime}/{name}.c"

    def data(self, name: str) -> str:
        return "tcp:127.0.0.1:0" if self.transport == "tcp" else f"{self.transport}:{self.runtime}/{name}.d"

    def node(self, name: str) -> Node:
        return Node(listen=self.address(name), instance_id=name, host="here", drain_s=8.0)

    @property
    def ledger(self) -> tuple[str, ...]:
        return (self.address("ledger"),)

    def channel(self, name: str) -> Any:
        channel = open_channel(self.address(name))
        self.channels.append(channel)
        return channel

    def launch(
        self, name: str, service: str, serve: Callable[[Any, Process], Awaitable[None]], config: Any
    ) -> None:
        telemetry = Telemetry(
            service=service, instance_id=name, registry=CollectorRegistry(), tracer=Tracer.off()
        )
        process = Process(
            service=service, instance_id=name, host="here", stop=asyncio.Event(), telemetry=telemetry
        )
        self.processes[name] = process
        self.tasks[name] = asyncio.create_task(_run(serve, scaled_settings(config), process), name=name)

    async def stop(self, name: str) -> None:
        self.processes.pop(name).stop.set()
        await asyncio.wait_for(self.tasks.pop(name), scaled(15))

    async def close(self) -> None:
        for channel in self.channels:
            await channel.close()
        # Whoever borrows goes before who lends, and the ledger last.
        for name in sorted(self.tasks, key=lambda one: (one == "ledger", one.startswith("pool"))):
            await self.stop(name)
        for child in self.children:
            child.kill()
            child.wait()
        if self.etcd is not None:
            self.etcd.close()

    async def prefill(
        self, name: str = "prefill", *, engine: dict[str, Any] | None = None, **changes: Any
    ) -> Any:
        config = PrefillConfig(
            node=self.node(name),
            engine=settings(self.folder, **(engine or {})),
            ledger=self.ledger,
            shape=shape_of(changes, stage_group=name),
            **({"chunk_tokens": CHUNK} | changes),
        )
        self.launch(name, "prefill", serve_prefill, config)
        stub = prefill_pb2_grpc.PrefillStub(self.channel(name))
        await ready(lambda: stub.Inspect(prefill_pb2.PrefillInspectRequest(), timeout=scaled(5)))
        return stub

    async def staged(
        self, stages: int, name: str = "prefill", *, tensor: int = 1, process: bool = False, **changes: Any
    ) -> Any:
        """A prefill of so many stages, of so many ranks each, which are together; those beside the first in
        this process, or each in its own. There is a ledger."""
        for member in range(1, stages * tensor):
            number, rank = divmod(member, tensor)
            self.stage(number, stages, name, rank=rank, tensor=tensor, process=process, **changes)
        stub = await self.prefill(name, stages=stages, stage_group=name, tensor=tensor, **changes)
        await self.together(stub)
        return stub

    def stage(
        self,
        number: int,
        stages: int,
        group: str = "prefill",
        *,
        rank: int = 0,
        tensor: int = 1,
        process: bool = False,
        **changes: Any,
    ) -> None:
        """One beside the first."""
        name = f"{group}-stage-{number}" + (f"-rank-{rank}" if rank else "")
        config = PrefillConfig(
            node=self.node(name),
            engine=settings(self.folder, **changes.pop("engine", {})),
            ledger=self.ledger,
            shape=shape_of(changes, stages=stages, stage=number, tensor=tensor, rank=rank, stage_group=group),
            data_listen=self.data(name),
            **({"chunk_tokens": CHUNK} | changes),
        )
        if not process:
            self.launch(name, "prefill", serve_prefill, config)
            return
        values = self._stage_flags(name, config) | {"chunk_tokens": config.chunk_tokens}
        self._child(name, "prefill", scaled_table(PrefillConfig, values))

    async def together(self, stub: Any) -> None:
        """Once a staged prefill computes."""
        request = prefill_request(self.model, [2, 3], no_reuse=True)
        await ready(lambda: compute(stub, request))

    async def decode(
        self, name: str = "decode", *, engine: dict[str, Any] | None = None, **changes: Any
    ) -> Any:
        config = DecodeConfig(
            node=self.node(name),
            data_plane=DataPlane(data_listen=self.data(name)),
            engine=settings(self.folder, **(engine or {})),
            ledger=self.ledger,
            shape=shape_of(changes),
            **({"placement": "local", "fetch_min_bytes": 0, "max_local_prefill_tokens": 0} | changes),
        )
        self.launch(name, "decode", serve_decode, config)
        await ready(lambda: self.inspect(name))
        return decode_pb2_grpc.DecodeStub(self.channel(name))

    async def staged_decode(
        self, stages: int, name: str = "decode", *, tensor: int = 1, process: bool = False, **changes: Any
    ) -> Any:
        """A decode of so many stages, of so many ranks each, which are together; those beside the first in
        this process, or each in its own. There is a ledger."""
        for member in range(1, stages * tensor):
            number, rank = divmod(member, tensor)
            self.decode_stage(number, stages, name, rank=rank, tensor=tensor, process=process, **changes)
        stub = await self.decode(name, stages=stages, stage_group=name, tensor=tensor, **changes)
        await self.decode_together(stub)
        return stub

    def decode_stage(
        self,
        number: int,
        stages: int,
        group: str = "decode",
        *,
        rank: int = 0,
        tensor: int = 1,
        process: bool = False,
        **changes: Any,
    ) -> None:
        """One beside the first."""
        name = f"{group}-stage-{number}" + (f"-rank-{rank}" if rank else "")
        config = DecodeConfig(
            node=self.node(name),
            data_plane=DataPlane(data_listen=self.data(name)),
            engine=settings(self.folder, **changes.pop("engine", {})),
            ledger=self.ledger,
            shape=shape_of(changes, stages=stages, stage=number, tensor=tensor, rank=rank, stage_group=group),
            **changes,
        )
        if not process:
            self.launch(name, "decode", serve_decode, config)
            return
        self._child(name, "decode", scaled_table(DecodeConfig, self._stage_flags(name, config)))

    async def decode_together(self, stub: Any) -> None:
        """Once a staged decode takes sequences."""
        request = turn(None, stub, self.model, [2, 3], 1).request

        async def reserved() -> None:
            call = stub.Generate(request, timeout=scaled(5))
            async for _ in call:
                call.cancel()
                return

        await ready(reserved)

    def _stage_flags(self, name: str, config: PrefillConfig | DecodeConfig) -> dict[str, Any]:
        engine, shape = config.engine, config.shape
        return {
            "listen": self.address(name), "instance_id": f"{name}-{len(self.children)}", "host": "here",
            "ledger": self.ledger[0], "model": engine.model, "dtype": engine.dtype, "device": engine.device,
            "block_tokens": engine.block_tokens, "capacity_tokens": engine.capacity_tokens,
            "stages": shape.stages, "stage": shape.stage, "stage_group": shape.stage_group,
            "tensor": shape.tensor, "rank": shape.rank, "data_listen": self.data(name),
        }  # fmt: skip

    async def kvstore(self, name: str = "kvstore") -> BlocksStub:
        config = KVStoreConfig(
            node=self.node(name),
            data_plane=DataPlane(data_listen=self.data(name)),
            ledger=self.ledger,
            data=self.runtime / f"{name}-data",
            folder=known_place(self.runtime / f"{name}-data"),
            dram_bytes=64 << 20,
            disk_bytes=256 << 20,
        )
        self.launch(name, "kvstore", serve_kvstore, config)
        stub = BlocksStub(self.channel(name))
        await ready(lambda: stub.Stats(kvstore_pb2.StatsRequest(), timeout=scaled(5)))
        return stub

    def history(self, matched_blocks: int, name: str = "kvstore") -> common_pb2.History:
        return common_pb2.History(
            control_address=self.address(name), data_address=self.data(name), matched_blocks=matched_blocks
        )

    async def lenders(
        self,
        *pools: int,
        process: bool = False,
        heads: Sequence[tuple[str, str] | None] = (),
        wait: bool = True,
    ) -> list[subprocess.Popen[bytes]]:
        """A ledger on a real etcd, and attention pools ("pool-0", …) of so many blocks, in this process or
        each in its own. `heads`: of which head group a pool is which part; None: it stands alone. `wait`:
        until all of them lend."""
        self.etcd = RealEtcd()
        self.etcd.start()
        config = LedgerConfig(
            node=self.node("ledger"),
            etcd=(self.etcd.endpoint,),
            heartbeat_ms=200,
            settle_every_s=3600,  # tests lead settlements themselves
        )
        self.launch("ledger", "ledger", serve_ledger, config)
        started = []
        for number, blocks in enumerate(pools):
            name, engine = f"pool-{number}", settings(self.folder, capacity_tokens=blocks * BLOCK)
            group, part = (heads[number] if number < len(heads) else None) or (None, None)
            if process:
                started.append(self.pool_process(name, engine, group, part))
                continue
            pool = AttentionPoolConfig(
                node=self.node(name),
                data_plane=DataPlane(data_listen=self.data(name)),
                engine=engine,
                ledger=self.ledger,
                heads=part,
                head_group=group,
            )
            self.launch(name, "attention_pool", serve_pool, pool)
        members = sum(one is not None and not one[1].startswith("0/") for one in heads)
        await self.lending(*(f"pool-{number}" for number in range(len(pools) - members if wait else 0)))
        return started

    async def lending(self, *names: str) -> None:
        """Once the ledger knows all of these as creditors."""
        stub = LedgerStub(self.channel("ledger"))

        async def lend() -> None:
            request = ledger_pb2.CandidatesRequest(debtor="nobody", host="here", model=self.model, blocks=1)
            if len((await stub.Candidates(request, timeout=scaled(5))).creditors) < min(len(names), 3):
                raise Unavailable("not all are registered yet")

        await ready(lend)

    def pool_process(
        self, name: str, engine: EngineSettings, group: str | None = None, part: str | None = None
    ) -> subprocess.Popen[bytes]:
        values = {
            "listen": self.address(name), "data_listen": self.data(name), "instance_id": name, "host": "here",
            "ledger": self.ledger[0], "model": engine.model, "dtype": engine.dtype, "device": engine.device,
            "block_tokens": engine.block_tokens, "capacity_tokens": engine.capacity_tokens,
        }  # fmt: skip
        if group is not None and part is not None:
            values |= {"head_group": group, "heads": part}
        return self._child(name, "attention_pool", scaled_table(AttentionPoolConfig, values))

    def _child(self, name: str, service: str, values: dict[str, Any]) -> subprocess.Popen[bytes]:
        flags = [f"--set={key}={value}" for key, value in values.items()]
        command = [sys.executable, "-m", f"services.{service}", f"--parent-pid={os.getpid()}", *flags]
        with (self.runtime / f"{name}.log").open("wb") as log:
            child = subprocess.Popen(command, stdout=log, stderr=log)
        self.children.append(child)
        return child

    async def inspect(self, name: str) -> holder_pb2.InspectReply:
        """What a holder says of its memory."""
        stub = holder_pb2_grpc.HolderStub(self.channel(name))
        reply: holder_pb2.InspectReply = await stub.Inspect(holder_pb2.InspectRequest(), timeout=scaled(5))
        return reply

    async def idle(self, *names: str) -> None:
        """Once all blocks of these holders are free and no segment is held."""
        until = time.monotonic() + scaled(10)
        for name in names:
            while (seen := await self.inspect(name)).free_blocks < seen.total_blocks or seen.segments:
                assert time.monotonic() < until, f"{name} keeps blocks: {seen}"
                await asyncio.sleep(0.02)


async def _run(serve: Callable[[Any, Process], Awaitable[None]], config: Any, process: Process) -> None:
    await serve(config, process)


def slow(*values: object) -> object:
    """A test's parameters that are for `make test-slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


async def prefill_idle(prefill: Any) -> prefill_pb2.PrefillInspectReply:
    """What it says once it has no job and all its blocks are free."""
    seen = prefill_pb2.PrefillInspectReply()

    async def idle() -> bool:
        nonlocal seen
        seen = await prefill.Inspect(prefill_pb2.PrefillInspectRequest(), timeout=scaled(5))
        return not seen.jobs and seen.free_blocks == seen.total_blocks

    await eventually(idle, "prefill gives back all its blocks")
    return seen


async def ready(call: Callable[[], Awaitable[Any]]) -> Any:
    """The call's answer as soon as there is one."""
    until = time.monotonic() + scaled(20)
    while True:
        try:
            return await call()
        except KVCommonsError:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.02)
