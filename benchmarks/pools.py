"""Attention pool processes for benchmarks, and sequences whose KV is there already."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcommons.errors import KVCommonsError, Unavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from kvcommons.engine.core import Core
    from kvcommons.holder.client import RemoteHolder
    from kvcommons.holder.segments import SegmentRef
    from services.decode.sequence import Run
    from services.decode.sequence import Sequence as DecodedSequence

START_S = 60.0
CALL_S = 30.0
_WRITTEN_AT_ONCE = 64  # blocks


@dataclass(frozen=True, slots=True)
class Pool:
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
) -> AsyncIterator[list[Pool]]:
    """So many real processes, each with that room, started at the same time."""
    async with AsyncExitStack() as stack:
        opened = [
            stack.enter_async_context(
                _pool(
                    f"unix:{folder}/pool-{number}",
                    f"{transport}:{folder}/pool-{number}-data",
                    {
                        "instance_id": f"pool-{number}",
                        "host": "here",
                        "ledger": f"unix:{folder}/no-ledger",
                        "model": str(model),
                        "block_tokens": core.block_tokens,
                        "capacity_tokens": capacity_tokens,
                        "threads": threads,
                        "log_level": "error",
                    },
                    core,
                )
            )
            for number in range(count)
        ]
        yield list(await asyncio.gather(*opened))


@asynccontextmanager
async def _pool(control: str, data: str, settings: dict[str, object], core: Core) -> AsyncIterator[Pool]:
    from kvcommons.holder.client import RemoteHolder

    values = {"listen": control, "data_listen": data, **settings}
    flags = [f"--set={key}={value}" for key, value in values.items()]
    child = subprocess.Popen(
        [sys.executable, "-m", "services.attention_pool", f"--parent-pid={os.getpid()}", *flags],
        env={**os.environ, "OMP_NUM_THREADS": str(settings["threads"])},
    )
    holder = RemoteHolder(control, data, owner="bench", model=core.info.fingerprint, lost=lambda refs: None)
    holder.start()
    try:
        until_s = time.monotonic() + START_S
        while True:
            try:
                await holder.inspect(timeout_s=1.0)
                break
            except KVCommonsError:
                if child.poll() is not None or time.monotonic() > until_s:
                    raise Unavailable("an attention pool did not start; its log says why") from None
                await asyncio.sleep(0.1)
        yield Pool(holder, child)
    finally:
        await holder.close()
        child.terminate()
        await asyncio.to_thread(child.wait, 20)


def fill(core: Core, holder: RemoteHolder, ref: SegmentRef, blocks: int) -> None:
    """With what the core's memory has: KV that was never written lies in one page, and reads too quickly."""
    from kvcommons.transport.deadline import Deadline

    for layer in range(core.layout.layers):
        for first in range(0, blocks, _WRITTEN_AT_ONCE):
            count = min(_WRITTEN_AT_ONCE, blocks - first)
            buffers = core.memory.read_buffers(layer, range(first, first + count))
            holder.write_blocks(ref, layer, first, buffers, Deadline.after(CALL_S))


def decoded(core: Core, key: int, tokens: int, end: int, runs: Sequence[Run]) -> DecodedSequence:
    """A sequence of so many tokens with their KV in `runs`, which generates until it has `end`."""
    from kvcommons.model.sampling import SamplingParams
    from kvcommons.pb import common_pb2
    from kvcommons.rblock.identity import SALT_BYTES, IdentityChain
    from services.decode.sequence import Generation, Sequence

    salt = bytes(SALT_BYTES)
    generation = Generation(
        request_id=f"bench-{key}", session_id="", tenant="bench", salt=salt, tokens=(1,) * tokens,
        prompt_tokens=tokens, max_position=end,
        sampling=SamplingParams.of(common_pb2.Sampling(temperature=0.0, top_p=1.0)),
        stop_token_ids=frozenset(), store_control="", store_data="", matched_blocks=0, no_reuse=True,
        start_wait_s=1.0,
    )  # fmt: skip
    chain = IdentityChain(salt, core.info.fingerprint, core.block_tokens)
    sequence = Sequence(key=key, generation=generation, block_tokens=core.block_tokens, chain=chain)
    for run in runs:
        sequence.append_run(run)
    return sequence
