"""Real ledger processes, and what tests ask of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvcommons.errors import KVCommonsError
from kvcommons.pb import common_pb2
from kvcommons.pb import ledger_pb2 as pb
from kvcommons.pb import ledger_pb2_grpc as rpc
from kvcommons.rpc.channel import open_channel
from services.ledger.config import LedgerConfig
from tests.machine import scaled, scaled_table

LEASE_S = 4  # several times what a busy machine holds a heartbeat up
HEARTBEAT_MS = 300
ETCD_TIMEOUT_S = 0.5
MODEL = b"m" * 32


class LedgerProcess:
    """One replica at `unix:FOLDER/NAME`."""

    def __init__(self, folder: Path, name: str, etcd: str) -> None:
        self.address = f"unix:{folder}/{name}"
        self.metrics = f"unix:{folder}/{name}.m"
        self._log = folder / f"{name}.log"
        self._settings = {
            "listen": self.address,
            "metrics_listen": self.metrics,
            "etcd": etcd,
            "instance_id": f"ledger-{name}",
            "lease_s": LEASE_S,
            "heartbeat_ms": HEARTBEAT_MS,
            "etcd_timeout_s": ETCD_TIMEOUT_S,
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        settings = scaled_table(LedgerConfig, self._settings)
        sets = [f"--set={name}={value}" for name, value in settings.items()]
        command = [sys.executable, "-m", "services.ledger", f"--parent-pid={os.getpid()}", *sets]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        assert self.process is not None
        self.process.wait()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def log(self) -> str:
        return self._log.read_text()


class Ledger:
    """Calls to one replica."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = open_channel(address)
        self._stub = rpc.LedgerStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def beat(self, one: pb.Instance, *, leaving: bool = False, timeout_s: float = 10) -> int:
        request = pb.HeartbeatRequest(instance=one, leaving=leaving)
        return (await self._stub.Heartbeat(request, timeout=scaled(timeout_s))).heartbeat_ms

    async def candidates(self, blocks: int = 1, *, timeout_s: float = 10, **fields: object) -> list[str]:
        request = pb.CandidatesRequest(
            debtor="debtor", host="h1", model=MODEL, blocks=blocks, **fields  # type: ignore[arg-type]
        )  # fmt: skip
        return [one.id for one in (await self._stub.Candidates(request, timeout=scaled(timeout_s))).creditors]

    async def settlements(self) -> list[pb.SettlementReport]:
        reply = await self._stub.Settlements(pb.SettlementsRequest(), timeout=scaled(10))
        return list(reply.settlements)

    async def refuse(self, creditor: str) -> None:
        await self._stub.ReportRefusal(
            pb.ReportRefusalRequest(debtor="debtor", creditor=creditor), timeout=scaled(10)
        )

    async def views(self, seconds: float) -> AsyncGenerator[pb.View, None]:
        call = self._stub.Watch(pb.WatchRequest(watcher="test"), timeout=seconds + 5)
        try:
            async with asyncio.timeout(seconds):
                async for view in call:
                    yield view
        except TimeoutError:
            pass
        finally:
            call.cancel()

    async def view(self) -> dict[str, pb.Instance]:
        """As a new watcher gets it."""
        call = self._stub.Watch(pb.WatchRequest(watcher="test"), timeout=scaled(10))
        try:
            async for view in call:
                return {one.id: one for one in view.instances}
        finally:
            call.cancel()
        raise AssertionError("the stream ended")

    async def ready(self) -> bool:
        with contextlib.suppress(KVCommonsError):
            answer = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=scaled(2))
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
        return False

    async def has(self, *ids: str) -> bool:
        with contextlib.suppress(KVCommonsError):
            return set(ids) <= set(await self.view())
        return False

    async def close(self) -> None:
        await self._channel.close(None)


def instance(
    name: str,
    *,
    service: str = "decode",
    free: int = 10,
    lendable: int = 5,
    host: str = "h1",
    started_ms: int = 1,
) -> pb.Instance:
    return pb.Instance(
        id=name,
        service=service,
        control_address=f"{name}.test:7000",
        data_address=f"unix:/run/{name}.d",
        host=host,
        model=common_pb2.ModelInfo(name="demo", fingerprint=MODEL),
        load=pb.Load(total_blocks=100, free_blocks=free, lendable_blocks=lendable, ready=True),
        started_ms=started_ms,
    )  # fmt: skip


async def beaten(by: Ledger, to: Ledger, *ones: pb.Instance) -> bool:
    """Whether `to` has them, after one more heartbeat of each at `by`: as instances do, again and again, for
    one that grows old before it is written is never written. To be called until it holds."""
    for one in ones:
        await by.beat(one)
    return await to.has(*(one.id for one in ones))
