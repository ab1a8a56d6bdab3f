"""Holder processes of benchmarks, which belong to no ledger, and sequences whose KV is there already."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcommons.errors import KVCommonsError, Unavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from typing_extensions import Buffer

    from kvcommons.engine.core import Core
    from kvcommons.engine.sequence import Run
    from kvcommons.engine.sequence import Sequence as DecodedSequence
    from kvcommons.holder.client import RemoteHolder
    from kvcommons.holder.head_group import Creditor
    from kvcommons.holder.segments import SegmentRef

START_S = 120.0
CALL_S = 60.0
_LOOK_S = 0.02  # between looks whether a process answers
_WRITTEN_AT_ONCE = 64  # blocks


@dataclass(frozen=True, slots=True)
class HolderProcess:
    holder: RemoteHolder
    process: subprocess.Popen[bytes]

    def cpu_s(self) -> float:
        """Of all of its threads, since it started."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def attention_pools(
    folder: Path,
    model: Path,
    core: Core,
    *,
    count: int,
    capacity_tokens: int,
    transport: str,
    threads: int = 1,
) -> AsyncIterator[list[HolderProcess]]:
    """So many attention pools, each with that room, started at the same time."""
    async with AsyncExitStack() as stack:
        opened = [
            stack.enter_async_context(
                holder_process(
                    "attention_pool",
                    folder,
                    f"pool-{number}",
                    f"{transport}:{folder}/pool-{number}-data",
                    core.info.fingerprint,
                    {
                        "model": model,
                        "block_tokens": core.block_tokens,
                        "capacity_tokens": capacity_tokens,
                        "threads": threads,
                    },
                    environment={"OMP_NUM_THREADS": str(threads)},
                )
            )
            for number in range(count)
        ]
        yield list(await asyncio.gather(*opened))


@asynccontextmanager
async def holder_process(
    service: str,
    folder: Path,
    name: str,
    data: str,
    identity: bytes,
    settings: Mapping[str, object],
    *,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[HolderProcess]:
    """A real process of `service`, once it answers; `identity` is the model's fingerprint. Raises
    Unavailable."""
    from kvcommons.holder.client import RemoteHolder

    control = f"unix:{folder}/{name}.c"
    values = {
        "listen": control, "data_listen": data, "instance_id": name, "host": "here",
        "ledger": f"unix:{folder}/no-ledger", "log_level": "error", **settings,
    }  # fmt: skip
    flags = [f"--set={key}={value}" for key, value in values.items()]
    child = subprocess.Popen(
        [sys.executable, "-m", f"services.{service}", f"--parent-pid={os.getpid()}", *flags],
        env={**os.environ, **(environment or {})},
    )
    holder = RemoteHolder(control, data, owner="bench", model=identity, lost=lambda refs: None)
    holder.start()
    try:
        until_s = time.monotonic() + START_S
        while True:
            try:
                await holder.inspect(timeout_s=1.0)
                break
            except KVCommonsError:
                if child.poll() is not None or time.monotonic() > until_s:
                    raise Unavailable(f"{name} ({service}) did not start; its log says why") from None
                await asyncio.sleep(_LOOK_S)
        yield HolderProcess(holder, child)
    finally:
        await holder.close()
        child.terminate()
        await asyncio.to_thread(child.wait, 30)


def tcp_address() -> str:
    """Of this host, with a port that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp:127.0.0.1:{probe.getsockname()[1]}"


def fill(core: Core, holder: RemoteHolder, ref: SegmentRef, blocks: int) -> None:
    """With what the core's memory has: KV that was never written lies in one page, and reads too quickly."""
    fill_with(holder, ref, core.layout.layers, blocks, core.memory.read_buffers)


def fill_with(
    holder: Creditor,
    ref: SegmentRef,
    layers: int,
    blocks: int,
    content: Callable[[int, range], Sequence[Buffer]],
) -> None:
    """All layers of the segment's first `blocks`; `content` gives a layer of some of them."""
    from kvcommons.transport.deadline import Deadline

    for layer in range(layers):
        for first in range(0, blocks, _WRITTEN_AT_ONCE):
            some = range(first, min(first + _WRITTEN_AT_ONCE, blocks))
            holder.write_blocks(ref, layer, first, content(layer, some), Deadline.after(CALL_S))


def decoded(
    core: Core, key: int, tokens: int, end: int, runs: Sequence[Run], *, no_reuse: bool = True
) -> DecodedSequence:
    """A sequence of so many tokens with their KV in `runs`, which generates until it has `end`."""
    from kvcommons.engine.request import Request
    from kvcommons.engine.sequence import Sequence
    from kvcommons.model.sampling import SamplingParams
    from kvcommons.pb import common_pb2
    from kvcommons.rblock.identity import SALT_BYTES, IdentityChain

    salt = bytes(SALT_BYTES)
    request = Request(
        request_id=f"bench-{key}", session_id="", tenant="bench", salt=salt, tokens=(1,) * tokens,
        prompt_tokens=tokens, max_position=end,
        sampling=SamplingParams.of(common_pb2.Sampling(temperature=0.0, top_p=1.0)),
        stop_token_ids=frozenset(), store_control="", store_data="", matched_blocks=0, no_reuse=no_reuse,
    )  # fmt: skip
    chain = IdentityChain(salt, core.info.fingerprint, core.block_tokens)
    sequence = Sequence(key=key, request=request, block_tokens=core.block_tokens, chain=chain)
    for run in runs:
        sequence.append_run(run)
    return sequence
