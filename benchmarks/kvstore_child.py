"""A kvstore as a child of a benchmark that needs one and no stack around it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvcommons.errors import Unavailable
from services.kvstore.place import RecordsPlace

READY_S_MAX = 60.0
STOP_S_MAX = 20.0


class KvstoreChild:
    """On Unix sockets and with its data in `folder`; ends with the context."""

    def __init__(self, folder: Path, *, dram_bytes: int, disk_bytes: int, **others: object) -> None:
        """`others`: more settings of the kvstore."""
        self.data_address = f"unix:{folder}/data.s"
        self.control_address = f"unix:{folder}/control.s"
        self._log = folder / "kvstore.log"
        settings = {
            "listen": self.control_address,
            "data_listen": self.data_address,
            "ledger": f"unix:{folder}/no-ledger",
            "data": folder / "kvstore",
            "dram_bytes": dram_bytes,
            "disk_bytes": disk_bytes,
            **others,
        }
        settings["folder"] = "alone"
        records = str(others.get("records", ""))  # no ledger says that these are the stack's
        if records:
            from services.kvstore.records.address import place_of  # psycopg's, which not all have
        where = f"database {place_of(records)}" if records else "folder alone"
        RecordsPlace(folder / "kvstore" / "records.place").note(where)
        flags = [f"--set={name}={value}" for name, value in settings.items()]
        self._command = [sys.executable, "-m", "services.kvstore", *flags]

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        try:
            self._wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_ready(self) -> None:
        until = time.monotonic() + READY_S_MAX
        with grpc.insecure_channel(self.control_address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < until and self._process.poll() is None:
                try:
                    answer = health.Check(health_pb2.HealthCheckRequest(), timeout=1, wait_for_ready=True)
                except grpc.RpcError:
                    continue
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        raise Unavailable(f"the kvstore did not come up; it said: {self._log.read_text()[-2000:]}")
