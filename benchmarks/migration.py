"""Live migration, as it is without memory of others (Infinite-LLM, section 6.3): a larger instance is
started, loads its weights from disk, and takes the sequence's KV over."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcommons.errors import KVCommonsError, Unavailable

if TYPE_CHECKING:
    from kvcommons.holder.client import RemoteHolder
    from kvcommons.holder.segments import SegmentRef
    from kvcommons.rblock.layout import Layout

BLOCK_TOKENS = 64
START_S = 120.0
CALL_S = 60.0
_WRITTEN_AT_ONCE = 16  # blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Seconds: until the larger instance answered, and until it had the KV."""

    start_s: float
    move_s: float


async def measure(folder: Path, model: Path, *, tokens: int, larger_tokens: int) -> Moved:
    """Real decode processes; the weights are read from the disk and not from the system's cache."""
    from kvcommons.model.spec import ModelSpec, fingerprint, model_info
    from kvcommons.rblock.layout import Layout

    identity = fingerprint(model, ModelSpec.read(model), "bfloat16", BLOCK_TOKENS)
    layout = Layout.of(model_info("bench", ModelSpec.read(model), identity, "bfloat16", BLOCK_TOKENS))
    blocks = tokens // BLOCK_TOKENS
    async with _decode(folder, "small", model, identity, tokens) as small:
        ref = await small.reserve("bench", blocks, first_position=0, timeout_s=CALL_S)
        await asyncio.to_thread(_fill, small, ref, layout, blocks)
        _forget(model)
        began_s = time.monotonic()
        async with _decode(folder, "large", model, identity, larger_tokens) as large:
            started_s = time.monotonic()
            into = await large.reserve("bench", blocks, first_position=0, timeout_s=CALL_S)
            frozen = await small.freeze(ref, blocks, timeout_s=CALL_S)
            await large.copy_in(
                into, small.data_address, frozen,
                first_block=0, source_block=0, blocks=blocks, timeout_s=CALL_S,
            )  # fmt: skip
            moved_s = time.monotonic()
    return Moved(start_s=started_s - began_s, move_s=moved_s - started_s)


@asynccontextmanager
async def _decode(
    folder: Path, name: str, model: Path, identity: bytes, capacity_tokens: int
) -> AsyncIterator[RemoteHolder]:
    """A decode instance that answers. It belongs to no ledger."""
    from kvcommons.holder.client import RemoteHolder

    control, data = f"unix:{folder}/{name}.c", f"tcp:127.0.0.1:{_free_port()}"
    values = {
        "listen": control, "data_listen": data, "instance_id": name, "host": "here",
        "ledger": f"unix:{folder}/no-ledger", "model": str(model), "block_tokens": BLOCK_TOKENS,
        "capacity_tokens": capacity_tokens, "lend_share": 1.0, "log_level": "error",
    }  # fmt: skip
    flags = [f"--set={key}={value}" for key, value in values.items()]
    child = subprocess.Popen([sys.executable, "-m", "services.decode", f"--parent-pid={os.getpid()}", *flags])
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
                    raise Unavailable(f"the {name} instance did not start; its log says why") from None
                await asyncio.sleep(0.02)
        yield holder
    finally:
        await holder.close()
        child.terminate()
        await asyncio.to_thread(child.wait, 30)


def _fill(holder: RemoteHolder, ref: SegmentRef, layout: Layout, blocks: int) -> None:
    from kvcommons.transport.deadline import Deadline

    data = os.urandom(layout.object_bytes)
    for layer in range(layout.layers):
        for first in range(0, blocks, _WRITTEN_AT_ONCE):
            count = min(_WRITTEN_AT_ONCE, blocks - first)
            holder.write_blocks(ref, layer, first, [data] * count, Deadline.after(CALL_S))


def _forget(model: Path) -> None:
    """Takes the model's files out of the system's cache."""
    for path in model.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are not written yet stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
