"""Holders for the holder suites: one embedded in the test process, as decode has it, and real attention
pools."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from kvcommons.backend.choice import choose
from kvcommons.backend.interface import Partial
from kvcommons.backend.memory import BlockMemory, byte_view
from kvcommons.blockstore.loader import BlockLoader, CorruptObject
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.errors import KVCommonsError
from kvcommons.holder import attend_call
from kvcommons.holder.client import RemoteHolder
from kvcommons.holder.data import HolderData, StartHook
from kvcommons.holder.head_group import Creditor, HeadGroup
from kvcommons.holder.head_store import WholeStore
from kvcommons.holder.holder import HeldModel, Holder
from kvcommons.holder.plan import PlanRow
from kvcommons.holder.segments import SegmentRef
from kvcommons.holder.server import HolderService
from kvcommons.model.spec import ModelSpec, fingerprint
from kvcommons.model.synthetic import write_random_folder
from kvcommons.pb import holder_pb2_grpc
from kvcommons.rblock.allocator import BlockAllocator
from kvcommons.rblock.heads import HeadPart
from kvcommons.rblock.layout import Layout
from kvcommons.rpc.dialer import Dialer
from kvcommons.rpc.server import RpcServer
from kvcommons.telemetry.telemetry import Telemetry
from kvcommons.transport.base import Observer
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.server import DataServer
from tests.backends import attend_chunk
from tests.machine import scaled
from tests.pausing import pause
from tests.waiting import eventually

BLOCKS = 24
BLOCK_TOKENS = 4
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
LAYOUT = Layout(
    layers=2, kv_heads=2, block_tokens=BLOCK_TOKENS, head_dim=16, kv_dtype="float32", query_heads=4
)
SCALE = 16**-0.5
FINGERPRINT = b"f" * 32
CLOSE: Any = {"rtol": 0.0, "atol": 1e-5}


def soon() -> Deadline:
    return Deadline.after(scaled(20))


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A holder that answers, wherever it runs."""

    control: str
    data: str
    model: bytes
    whole: bytes  # the model, where this one has a part of its heads
    embedded: Holder | None = None
    again: Callable[[], None] = lambda: None  # of an embedded one: its data plane stops, and starts anew

    @property
    def holder(self) -> Holder:
        assert self.embedded is not None, "it is another process"
        return self.embedded

    @asynccontextmanager
    async def debtor(
        self,
        owner: str = "debtor-1",
        *,
        lease_s: float = 10.0,
        lost: list[SegmentRef] | None = None,
        observer: Observer | None = None,
    ) -> AsyncIterator[RemoteHolder]:
        """A client; what it still has at the end is released."""
        gone = [] if lost is None else lost
        client = RemoteHolder(
            self.control, self.data, owner=owner, model=self.model, lost=gone.extend, lease_s=lease_s,
            dialer=Dialer(observer=observer),
        )  # fmt: skip
        client.start()
        try:
            yield client
        finally:
            try:
                await client.release(client.borrowed, timeout_s=scaled(5))
            except KVCommonsError:
                pass  # the holder is gone, which some tests want
            await client.close()


class NoStores:
    """For holders whose kvstore is never told anything."""

    def know(self, *, data_address: str, control_address: str) -> None:
        raise AssertionError("no control address was given")


@asynccontextmanager
async def embedded(
    folder: Path,
    *,
    windows: tuple[int | None, ...] = (None, None),
    lend_blocks_max: int | None = None,
    corrupt: list[CorruptObject] | None = None,
    on_start: StartHook | None = None,
    part: HeadPart | None = None,
    layout: Layout = LAYOUT,
    blocks: int = BLOCKS,
    data: str = "tcp:127.0.0.1:0",
) -> AsyncIterator[Served]:
    """A holder in this process, its data plane on TCP; `part`: of the KV heads, None is all of them."""
    identity = part.model(FINGERPRINT) if part is not None else FINGERPRINT
    memory = BlockMemory(part.layout(layout) if part is not None else layout, blocks)
    memory.tensor.fill_(float("nan"))  # what was never written must never count
    model = HeldModel(fingerprint=identity, scale=SCALE, windows=windows)
    holder = Holder(
        memory, BlockAllocator(blocks), model, instance_id="holder-1", lend_blocks_max=lend_blocks_max
    )
    loader = BlockLoader(([] if corrupt is None else corrupt).append)
    saver = BlockSaver("holder-1", hold_s=1)
    service = HolderService()
    name = f"control-{part.number}" if part is not None else "control"
    server = RpcServer(f"unix:{folder}/{name}", Telemetry.off("decode"))
    server.add(holder_pb2_grpc.add_HolderServicer_to_server, service)
    held = HolderData(holder, on_start_sequence=on_start)

    def serve() -> DataServer:
        server = DataServer(data, held, name="holder", session=held.attention.session)
        server.start()
        return server

    servers = [serve()]

    def again() -> None:
        assert servers[0].stop(5)
        servers[0] = serve()

    await server.start()
    service.open(holder, loader, saver, NoStores())
    try:
        address = servers[0].address
        yield Served(
            control=server.address,
            data=address,
            model=identity,
            whole=FINGERPRINT,
            embedded=holder,
            again=again,
        )
    finally:
        await server.drain(1)
        assert await asyncio.to_thread(servers[0].stop, 5)
        await service.close()
        await asyncio.to_thread(loader.close)
        await asyncio.to_thread(saver.close, Deadline.after(1))


class PoolProcess:
    """A real attention pool on Unix sockets. No ledger answers: services start in any order."""

    def __init__(self, folder: Path, number: int = 0, *, part: HeadPart | None = None) -> None:
        """`number`: of those in this folder, which have one model. `part`: of the KV heads; None: all of
        them."""
        self.folder = folder
        model = folder / "model"
        if not model.exists():
            write_random_folder(model, CONFIG, dtype="float32")
        spec = ModelSpec.read(model)
        settings = {
            "listen": f"unix:{folder}/pool{number}",
            "data_listen": f"unix:{folder}/pool{number}.d",
            "ledger": json.dumps([f"unix:{folder}/no-ledger"]),
            "model": str(model),
            "dtype": "float32",
            "block_tokens": str(BLOCK_TOKENS),
            "capacity_tokens": str(BLOCKS * BLOCK_TOKENS),
            "drain_s": str(scaled(20.0)),
            "log_level": "error",
        }
        identity = whole = fingerprint(model, spec, "float32", BLOCK_TOKENS)
        if part is not None:
            settings |= {"heads": str(part), "head_group": "group"}
            identity = part.model(identity)
        flags = [text for name, value in settings.items() for text in ("--set", f"{name}={value}")]
        self.process = subprocess.Popen([sys.executable, "-m", "services.attention_pool", *flags])
        self.served = Served(
            control=settings["listen"],
            data=settings["data_listen"],
            model=identity,
            whole=whole,
        )

    async def ready(self) -> Served:
        async with self.served.debtor() as client:
            deadline = Deadline.after(scaled(60))
            while True:
                assert self.process.poll() is None, "the pool did not start"
                try:
                    await client.inspect(timeout_s=scaled(1))
                    return self.served
                except KVCommonsError:
                    deadline.check("starting the pool")
                    await asyncio.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(scaled(10))

    def pause(self) -> None:
        pause(self.process.pid)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def exit_code(self) -> int:
        await eventually(lambda: self.process.poll() is not None)
        return int(self.process.returncode)


@contextmanager
def pools(*parts: HeadPart | None) -> Iterator[list[PoolProcess]]:
    """One for each part of the KV heads (None: all of them), of one model."""
    folder = Path(tempfile.mkdtemp(prefix="kvc-"))
    made = [PoolProcess(folder, number, part=part) for number, part in enumerate(parts)]
    try:
        yield made
    finally:
        for pool in made:
            pool.kill()
        shutil.rmtree(folder)


@asynccontextmanager
async def group_of(
    parts: Sequence[Served],
    *,
    store: WholeStore | None = None,
    lost: list[SegmentRef] | None = None,
    lease_s: float = 10.0,
) -> AsyncIterator[HeadGroup]:
    """A head group of them; what it still has at the end is released. Without a `store` nothing is loaded or
    saved."""
    group = HeadGroup(
        [(one.control, one.data) for one in parts], LAYOUT, owner="debtor-1", model=parts[0].whole,
        store=store or cast(WholeStore, "never asked"), lost=([] if lost is None else lost).extend,
        lease_s=lease_s,
    )  # fmt: skip
    group.start()
    try:
        yield group
    finally:
        with suppress(KVCommonsError):  # a part that was killed
            await group.release(group.borrowed, timeout_s=scaled(5))
        await group.close()


async def all_back(*holders: Served) -> None:
    """Every block comes back: a layer that is still computed keeps its own until it ends."""
    for served in holders:
        async with served.debtor("who asks") as client:
            until = Deadline.after(scaled(10))
            while (seen := await client.inspect(timeout_s=scaled(5))).segments or seen.free_blocks < BLOCKS:
                until.check(f"blocks to come back: {seen}")
                await asyncio.sleep(0.02)


def begin_attend(
    creditor: Creditor,
    layer: int,
    rows: Sequence[PlanRow],
    q: Tensor,
    appended: Sequence[Tensor],
    deadline: Deadline,
) -> attend_call.PendingPartial:
    kv = torch.cat(list(appended)) if appended else None
    return attend_call.begin_attend(LAYOUT, choose(), creditor.recipients(rows), layer, q, kv, deadline)


class Tokens:
    """A sequence's K and V in one layer, and what attention over all of them is."""

    def __init__(self, count: int, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        self.k = torch.randn(count, LAYOUT.kv_heads, LAYOUT.head_dim, generator=source)
        self.v = torch.randn(count, LAYOUT.kv_heads, LAYOUT.head_dim, generator=source)
        self.q = torch.randn(count, LAYOUT.query_heads, LAYOUT.head_dim, generator=source)

    def objects(self, first: int, last: int) -> list[memoryview]:
        """Tokens first..last as objects, the last block filled up with NaN: those bytes must not count."""
        blocks = -(-(last - first) // BLOCK_TOKENS)
        both = torch.full((2, blocks * BLOCK_TOKENS, LAYOUT.kv_heads, LAYOUT.head_dim), float("nan"))
        both[0, : last - first], both[1, : last - first] = self.k[first:last], self.v[first:last]
        shaped = both.view(2, blocks, BLOCK_TOKENS, LAYOUT.kv_heads, LAYOUT.head_dim).permute(1, 0, 3, 2, 4)
        return [byte_view(block) for block in shaped.contiguous()]

    def appended(self, first: int, last: int) -> Tensor:
        """[rows, 2, kv_heads, D]."""
        return torch.stack((self.k[first:last], self.v[first:last]), dim=1)

    def whole(self, rows: Sequence[int], window: int | None = None) -> Partial:
        """One holder's result for the rows, over everything before them and themselves."""
        return local_partial(self, rows, 0, len(self.k), window)


def local_partial(
    tokens: Tokens, rows: Sequence[int], first: int, last: int, window: int | None = None
) -> Partial:
    """Of keys first..last, held here."""
    memory = BlockMemory(LAYOUT, max(1, -(-(last - first) // BLOCK_TOKENS)))
    memory.write_tokens(0, torch.arange(last - first), tokens.k[first:last], tokens.v[first:last])
    return attend_chunk(
        tokens.q[list(rows)],
        memory.layer(0),
        torch.arange(memory.blocks),
        last - first,
        first_key_position=first,
        query_positions=torch.tensor(list(rows)),
        scale=SCALE,
        window=window,
    )
