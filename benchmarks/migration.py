"""Live migration, as it is without memory of others (Infinite-LLM, section 6.3): a larger instance is
started, loads its weights from disk, and takes the sequence's KV over."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.holders import CALL_S, fill_with, holder_process, tcp_address

if TYPE_CHECKING:
    from kvcommons.holder.client import RemoteHolder

BLOCK_TOKENS = 64


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
        data = os.urandom(layout.object_bytes)
        await asyncio.to_thread(
            fill_with, small, ref, layout.layers, blocks, lambda _, some: [data] * len(some)
        )
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
    """A decode instance that answers."""
    settings = {
        "model": model, "block_tokens": BLOCK_TOKENS, "capacity_tokens": capacity_tokens, "lend_share": 1.0,
    }  # fmt: skip
    async with holder_process("decode", folder, name, tcp_address(), identity, settings) as process:
        yield process.holder


def _forget(model: Path) -> None:
    """Takes the model's files out of the system's cache."""
    for path in model.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are not written yet stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
