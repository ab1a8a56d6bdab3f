"""A real kvstore process, and the calls of its peers."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvcommons.errors import from_grpc
from kvcommons.pb import data_pb2 as data
from kvcommons.pb import kvstore_pb2 as pb
from kvcommons.pb import kvstore_pb2_grpc as rpc
from kvcommons.rblock.checksum import checksum
from kvcommons.transport.client import DataClient
from kvcommons.transport.deadline import Deadline
from services.kvstore.config import KVStoreConfig
from services.kvstore.place import RecordsPlace
from services.kvstore.records.address import place_of
from services.kvstore.tier import BlockShape
from tests.machine import scaled, scaled_table
from tests.unit.kvstore.samples import SHAPE, payload

START_S = scaled(60.0)


class Errors(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    """Raises what the peer raised."""

    def intercept_unary_unary(self, continuation, details, request):  # type: ignore[no-untyped-def]
        call = continuation(details, request)
        if call.exception() is not None:
            raise from_grpc(call.exception())
        return call


def known_place(data: Path, records: str = "") -> str:
    """Lets a kvstore that no ledger will tell it know that its records are the stack's; its `folder`."""
    where = f"database {place_of(records)}" if records else "folder alone"
    RecordsPlace(data / "records.place").note(where)
    return "alone"


class KvstoreProcess:
    """`python -m services.kvstore` on Unix sockets in `sockets`, keeping its data in `data`."""

    def __init__(self, sockets: Path, data_folder: Path, **settings: object) -> None:
        self.control = f"unix:{sockets}/control"
        self.data_address = f"unix:{sockets}/data"
        self.metrics = sockets / "metrics"
        flags = {
            "listen": self.control,
            "data_listen": self.data_address,
            "metrics_listen": f"unix:{self.metrics}",
            "ledger": f"unix:{sockets}/no-ledger",
            "data": data_folder,
            "dram_bytes": 16 << 20,
            "disk_bytes": 64 << 20,
            "staging_s": 20,
            "drain_s": 20,
        } | settings
        if "ledger" not in settings:
            flags |= {"folder": known_place(data_folder, str(settings.get("records", "")))}
        flags = scaled_table(KVStoreConfig, flags)
        command = [sys.executable, "-m", "services.kvstore"]
        for name, value in flags.items():
            command += ["--set", f"{name}={value}"]
        self._log = sockets / "log"  # a pipe that nobody reads would fill up, and hold the process up
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log)
        self.channel = grpc.insecure_channel(self.control)
        intercepted = grpc.intercept_channel(self.channel, Errors())
        self.blocks = rpc.BlocksStub(intercepted)
        self.sessions = rpc.SessionsStub(intercepted)
        self._health = health_pb2_grpc.HealthStub(self.channel)
        self.client = DataClient(self.data_address)

    def wait_ready(self) -> KvstoreProcess:
        give_up = time.monotonic() + START_S
        while time.monotonic() < give_up and self.process.poll() is None:
            if self.is_ready():
                return self
        self.kill()
        raise AssertionError(f"the kvstore did not come up: {self.errors}")

    def wait_written(self) -> pb.StatsReply:
        """Until all blocks that are complete are on disk, as far as it has room."""
        give_up = time.monotonic() + scaled(20.0)
        while (stats := self.blocks.Stats(pb.StatsRequest(), timeout=scaled(20.0))).pending_writes:
            assert time.monotonic() < give_up, stats
            time.sleep(0.02)
        return stats

    def is_ready(self) -> bool:
        try:
            answer = self._health.Check(health_pb2.HealthCheckRequest(), timeout=1, wait_for_ready=True)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def kill(self) -> None:
        self.process.kill()
        self._end()

    def terminate(self, timeout_s: float = 40.0) -> int:
        self.process.terminate()
        self.process.wait(scaled(timeout_s))
        self._end()
        return self.process.returncode

    def _end(self) -> None:
        self.client.close()
        self.channel.close()
        self.process.wait(scaled(10))
        self.errors = self._log.read_text()

    @property
    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS"))

    # ---- the data plane

    def put_layer(
        self,
        ids: Sequence[bytes],
        layer: int,
        *,
        count: int = 1,
        shape: BlockShape = SHAPE,
        writer: str = "writer",
        tenant: str = "tenant",
        deadline_s: float = 10.0,
    ) -> list[int]:
        """Sends `count` layers; the indices that the store does not want."""
        keys = [(block_id, each) for block_id in ids for each in range(layer, layer + count)]
        objects = [payload(block_id, each, shape) for block_id, each in keys]
        request = data.DataRequest(
            put_layer=data.PutLayer(
                model=shape.model,
                tenant=tenant,
                writer=writer,
                layer=layer,
                count=count,
                layers=shape.layers,
                first_block=0,
                block_ids=ids,
                checksums=[checksum(*key, part) for key, part in zip(keys, objects, strict=True)],
            )
        )
        reply = self.client.call(request, objects, deadline=Deadline.after(scaled(deadline_s)))
        return list(reply.put_layer.unwanted)

    def put_blocks(
        self,
        ids: Sequence[bytes],
        *,
        shape: BlockShape = SHAPE,
        writer: str = "writer",
        tenant: str = "tenant",
    ) -> None:
        for layer in range(shape.layers):
            self.put_layer(ids, layer, shape=shape, writer=writer, tenant=tenant)

    def get_blocks(
        self, ids: Sequence[bytes], *, shape: BlockShape = SHAPE, deadline_s: float = 10.0
    ) -> tuple[int, list[int]]:
        """How many leading blocks came in all layers, and their generations; asserts that all is right."""
        request = data.DataRequest(
            get_layers=data.GetLayers(model=shape.model, block_ids=ids, first_layer=0, layers=shape.layers)
        )
        room = bytearray(len(ids) * shape.object_bytes)
        length, generations = len(ids), [0] * len(ids)
        replies = self.client.stream(
            request,
            into=lambda _, size: [memoryview(room)[:size]],
            replies=shape.layers,
            deadline=Deadline.after(scaled(deadline_s)),
        )
        for layer, reply in enumerate(replies):
            got = reply.got_layer
            assert got.layer == layer
            assert len(got.checksums) == len(got.generations) <= length
            length, generations = len(got.checksums), list(got.generations)
            for number, digest in enumerate(got.checksums):
                part = room[number * shape.object_bytes : (number + 1) * shape.object_bytes]
                assert part == payload(ids[number], layer, shape)
                assert digest == checksum(ids[number], layer, part)
        return length, generations
