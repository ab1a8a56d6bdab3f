"""A real stack under test: every service its own process, real etcd, RocksDB and sockets, on a free port.

with Stack(tmp_path, tables={"prefill": {"dtype": "float32"}}, decode=2) as stack:
    turn = stack.client.say("My cat is called Zuzu.", "s")
    stack.kill("decode-1")
    ...
stack.assert_gone()
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc

from devstack.running import RunningStack
from devstack.settings import UpSettings
from kvcommons.pb import holder_pb2, holder_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from services.attention_pool.config import AttentionPoolConfig
from services.decode.config import DecodeConfig
from services.kvstore.config import KVStoreConfig
from services.ledger.config import LedgerConfig
from services.prefill.config import PrefillConfig
from services.router.config import RouterConfig
from tests.machine import SLOWNESS, scaled, scaled_table

INSPECT_S_MAX = scaled(5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """What a holder or prefill says about its memory."""

    total: int
    free: int
    cached: int
    users: int  # segments or jobs
    lent: int = 0


SCHEMAS: dict[str, type] = {
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "attention_pool": AttentionPoolConfig,
    "kvstore": KVStoreConfig,
    "ledger": LedgerConfig,
    "up": UpSettings,
}


def scaled_tables(given: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """All tables of kvcommons.toml, with the waits of each."""
    return {name: scaled_table(schema, given.get(name, {})) for name, schema in SCHEMAS.items()}


class Stack(RunningStack):
    """What tests ask of a stack beyond running it. All waits, those of its services too, are scaled by the
    machine's slowness."""

    wait_scale = SLOWNESS

    def __init__(
        self,
        folder: Path,
        *,
        tables: Mapping[str, Mapping[str, Any]] | None = None,
        **flags: str | int | bool,
    ) -> None:
        given = dict(tables or {})
        # Prompts of tests are short, and what most of them watch lies between prefill and decode.
        given["decode"] = {"max_local_prefill_tokens": 0, **given.get("decode", {})}
        super().__init__(folder, tables=scaled_tables(given), **flags)

    @property
    def colocated(self) -> bool:
        """Whether decode's processes have prefill's role, too."""
        return self._flags.get("colocated") is True

    @property
    def v1(self) -> str:
        """`base_url` for the OpenAI SDK."""
        return f"{self.url}/v1"

    def blocks(self, name: str) -> Blocks:
        """Of "decode…", "attention_pool…" or "prefill…"."""
        return blocks_of(name, self._control(name))

    def inspector(self, name: str) -> Callable[[], Blocks]:
        """`blocks` over a channel that stays open: for what has to be found out within a token's time."""
        inspect = _inspector(name, grpc.insecure_channel(self._control(name)))
        inspect()
        return inspect

    def assert_no_block_is_held(self, wait_s: float = 10.0) -> None:
        """On no instance, once what was under way has ended."""
        services = ("decode", "attention_pool", "prefill")
        names = [process.name for process in self.processes() if process.name.startswith(services)]
        assert names
        for name in names:
            self.until(
                lambda name=name: self._is_idle(name), wait_s, f"{name} holds blocks or does not answer"
            )

    def assert_gone(self) -> None:
        """No process, no port, no socket is left."""
        assert self.processes() == []
        address = urlsplit(self.url)
        with socket.socket() as probe:
            assert probe.connect_ex((address.hostname, address.port)) != 0, "the port still answers"
        assert str(self.runtime) not in Path("/proc/net/unix").read_text()
        assert not self.runtime.exists()

    def _control(self, name: str) -> str:
        return f"unix:{self.runtime / name}.c"

    def has_loaded(self, name: str) -> bool:
        """Whether an instance has its model, and says what it holds."""
        return self._blocks_if_loaded(name) is not None

    def _is_idle(self, name: str) -> bool:
        blocks = self._blocks_if_loaded(name)
        return blocks is not None and blocks.users == 0 and blocks.free == blocks.total

    def _blocks_if_loaded(self, name: str) -> Blocks | None:
        try:
            return self.blocks(name)
        except grpc.RpcError:  # killed a moment ago, and loading its model again
            return None


def blocks_of(name: str, address: str) -> Blocks:
    """Of an instance at this control address; its name begins with its service's."""
    with grpc.insecure_channel(address) as channel:
        return _inspector(name, channel)()


def _inspector(name: str, channel: grpc.Channel) -> Callable[[], Blocks]:
    def prefill() -> Blocks:
        found = prefill_pb2_grpc.PrefillStub(channel).Inspect(
            prefill_pb2.PrefillInspectRequest(), timeout=INSPECT_S_MAX, wait_for_ready=True
        )
        return Blocks(
            total=found.total_blocks, free=found.free_blocks, cached=found.cached_blocks, users=found.jobs
        )

    def holder() -> Blocks:
        found = holder_pb2_grpc.HolderStub(channel).Inspect(
            holder_pb2.InspectRequest(), timeout=INSPECT_S_MAX, wait_for_ready=True
        )
        return Blocks(
            total=found.total_blocks,
            free=found.free_blocks,
            cached=found.cached_blocks,
            users=len(found.segments),
            lent=found.lent_blocks,
        )

    return prefill if name.startswith("prefill") else holder
