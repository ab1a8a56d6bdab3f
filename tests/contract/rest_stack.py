"""The router's own `serve`, a real kvstore process and scripted engines, for the REST suites."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import openai

from kvcommons.config import Node
from kvcommons.model.tokenizer import Tokenizer
from kvcommons.pb import common_pb2 as pb
from kvcommons.pb import kvstore_pb2, kvstore_pb2_grpc, ledger_pb2
from kvcommons.rpc.process import Process
from kvcommons.telemetry.telemetry import Telemetry
from services.router.__main__ import serve
from services.router.api.routes import routes
from services.router.config import RouterConfig
from tests.contract.kvstore_process import known_place
from tests.contract.rest_engine import Engine, Script, ScriptedLedger
from tests.machine import scaled, scaled_settings
from tests.waiting import eventually

MODEL_FOLDER = Path(__file__).parents[2] / "demo" / "model"
BLOCK_TOKENS = 16
WINDOW = 2048
MODEL = pb.ModelInfo(
    name="demo",
    fingerprint=b"f" * 32,
    layers=2,
    kv_heads=8,
    head_dim=32,
    block_tokens=BLOCK_TOKENS,
    kv_dtype="float32",
    vocab_size=1024,
    context_window=WINDOW,
    query_heads=8,
)


class KvStore:
    """`python -m services.kvstore` on Unix sockets in `folder`."""

    def __init__(self, folder: Path, records: str = "") -> None:
        """`records`: a database, if they are to lie in one."""
        self._folder = folder
        self._records = records
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def instance(self) -> ledger_pb2.Instance:
        return ledger_pb2.Instance(
            id="kvstore-0",
            service="kvstore",
            control_address=f"unix:{self._folder}/kv.sock",
            data_address=f"unix:{self._folder}/kvd.sock",
            host="here",
            load=ledger_pb2.Load(ready=True),
        )

    def start(self) -> None:
        settings = {
            "listen": f"unix:{self._folder}/kv.sock",
            "data_listen": f"unix:{self._folder}/kvd.sock",
            "ledger": f"unix:{self._folder}/none.sock",
            "data": str(self._folder / "data"),
            "dram_bytes": str(8 << 20),
            "disk_bytes": str(32 << 20),
            "records": self._records,
            "folder": known_place(self._folder / "data", self._records),
        }
        flags = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        with (self._folder / "kvstore.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "services.kvstore", *flags], stdout=log, stderr=log
            )
        self._await_ready()

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(timeout=scaled(10))

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(timeout=scaled(20))

    def _await_ready(self) -> None:
        deadline_s = time.monotonic() + scaled(20)
        while True:
            with grpc.insecure_channel(f"unix:{self._folder}/kv.sock") as channel:
                try:
                    kvstore_pb2_grpc.BlocksStub(channel).Stats(kvstore_pb2.StatsRequest(), timeout=scaled(1))
                    return
                except grpc.RpcError:
                    assert self._process is not None
                    assert self._process.poll() is None, (self._folder / "kvstore.log").read_text()
                    assert time.monotonic() < deadline_s, "the kvstore is not ready in time"
            time.sleep(0.05)


@dataclass
class Stack:
    ledger: ScriptedLedger
    engines: list[Engine]
    script: Script
    store: KvStore
    tokenizer: Tokenizer
    url: str
    client: openai.AsyncOpenAI
    http: aiohttp.ClientSession
    stop: asyncio.Event  # of the router

    def says(self, *texts: str, end: bool = True) -> list[list[int]]:
        """Has the engines answer choice i with texts[i], then with the end-of-turn token."""
        eos = min(self.tokenizer.eos_ids)
        self.script.answers = [self.tokenizer.encode_text(text) + [eos] * end for text in texts]
        return self.script.answers

    async def show(
        self, *, engines: bool = True, store: bool = True, headers: Mapping[str, str] | None = None
    ) -> None:
        """What the ledger's view holds from now on; returns once the router knows."""
        instances = [one for engine in self.engines for one in engine.instances()] if engines else []
        if store:
            instances.append(self.store.instance)
        await self.ledger.show(instances)

        async def seen() -> bool:
            async with self.http.get("/v1/status", headers=headers) as response:
                known = {instance["id"] for instance in (await response.json())["instances"]}
            return known == {instance.id for instance in instances}

        await eventually(seen)

    async def post(self, path: str, body: Any = None, **options: Any) -> tuple[int, dict[str, Any]]:
        async with self.http.post(path, json=body, **options) as response:
            return response.status, _described("POST", path, response.status, await response.json())

    async def get(self, path: str, **options: Any) -> tuple[int, dict[str, Any]]:
        async with self.http.get(path, **options) as response:
            return response.status, _described("GET", path, response.status, await response.json())

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The data of a stream's events, in order; the last one is "[DONE]" where it came."""
        async with self.http.post(path, json=body | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            lines = [line async for line in response.content if line.startswith(b"data: ")]
        found = ["[DONE]" if line == b"data: [DONE]\n" else json.loads(line[6:]) for line in lines]
        (route,) = (one for one in routes() if one.path == path and one.stream is not None)
        for event in found:
            if event != "[DONE]":
                described = route.error if "error" in event else route.stream
                assert described is not None
                described.model_validate_json(json.dumps(event))
        return found

    @property
    def calls(self) -> int:
        """Calls to prefill and decode that are under way."""
        return sum(engine.calls for engine in self.engines)


def _described(method: str, path: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """The body of an answer, which is as /openapi.json describes it."""
    for route in routes():
        if route.method == method and re.fullmatch(
            re.sub("{id}", "[^/]+", route.path), path.partition("?")[0]
        ):
            described = route.answers.get(status) or route.error
            described.model_validate_json(json.dumps(body))
    return body


@contextlib.asynccontextmanager
async def stack(
    folder: Path,
    store: KvStore,
    *,
    engines: int = 1,
    model: Path = MODEL_FOLDER,
    settings: Mapping[str, Any] | None = None,
    telemetry: Telemetry | None = None,
) -> AsyncIterator[Stack]:
    """A router that serves on a free port of loopback, until the body ends; its engines' and its ledger's
    sockets are in `folder`, which no other one may have."""
    folder.mkdir(exist_ok=True)
    script = Script()
    ledger = ScriptedLedger(folder)
    await ledger.start()
    running = [Engine(folder, f"engine{at}", script, MODEL) for at in range(engines)]
    for engine in running:
        await engine.start()
    port = free_port()
    config = RouterConfig(
        node=Node(listen=f"unix:{folder}/router.sock", drain_s=2.0),
        ledger=(ledger.address,),
        model=str(model),
        port=port,
        **{"durable_wait_ms": 20, "commit_deadline_s": 5.0, **(settings or {})},
    )
    process = Process(
        service="router",
        instance_id=f"router-{os.getpid()}",
        host="here",
        stop=asyncio.Event(),
        telemetry=telemetry or Telemetry.off("router"),
    )
    router = asyncio.create_task(serve(scaled_settings(config), process))
    trust = None if config.tls_cert is None else ssl.create_default_context(cafile=config.tls_cert)
    url = f"{'http' if trust is None else 'https'}://127.0.0.1:{port}"
    # Plain HTTP: no test waits for the system's authorities to be read.
    plain = openai.DefaultAsyncHttpxClient(verify=False)
    client = openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=scaled(20), http_client=plain
    )
    http = aiohttp.ClientSession(
        url,
        connector=aiohttp.TCPConnector(ssl=trust or True),
        timeout=aiohttp.ClientTimeout(total=scaled(20)),
    )
    tokenizer = Tokenizer.read(MODEL_FOLDER)
    served = Stack(
        ledger=ledger,
        engines=running,
        script=script,
        store=store,
        tokenizer=tokenizer,
        url=url,
        client=client,
        http=http,
        stop=process.stop,
    )
    try:
        await eventually(lambda: listens(port) or router.done())
        if not router.done():
            yield served
    finally:
        await http.close()
        await client.close()
        process.stop.set()
        await asyncio.wait_for(router, scaled(15))
        for engine in running:
            await engine.stop()
        await ledger.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
