"""What an iteration does beside attention does not grow with the context, here and at a holder (Mnemosyne,
section 5): counted, not timed."""

from __future__ import annotations

import struct
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.fixed_time import BLOCK_TOKENS, LAYERS, WINDOW, Kind, Watch, iterate, tiny_core
from kvcommons.backend.memory import BlockMemory
from kvcommons.engine.core import Core
from kvcommons.engine.sequence import RemoteRun
from kvcommons.holder.client import RemoteHolder
from kvcommons.holder.data import HolderData
from kvcommons.holder.holder import HeldModel, Holder
from kvcommons.rblock.allocator import BlockAllocator
from kvcommons.transport.server import DataServer
from tests.machine import scaled

SHORT, LONG = 1 << 10, 1 << 18
BLOCKS = (LONG - SHORT) // BLOCK_TOKENS  # that the long one has more
POINTER_BYTES = struct.calcsize("P")
TOKENS, CHUNKS = 2 * BLOCK_TOKENS + 8, 24
CAPACITY = LONG + CHUNKS * BLOCK_TOKENS + BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Work:
    """Since the look before, of all threads."""

    calls: int  # of Python functions
    numbers: int  # that tensors were made of
    held_bytes: int  # of Python's memory, more than at the beginning, at some time


class Counting(Watch):
    """The first looks are not counted: what is made once is made there."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.numbers = self._held_bytes = 0
        self._works: list[Work] = []

    def look(self) -> None:
        held_bytes, peak_bytes = tracemalloc.get_traced_memory()
        self._works.append(Work(self.calls, self.numbers, peak_bytes - self._held_bytes))
        tracemalloc.reset_peak()
        self.calls, self.numbers, self._held_bytes = 0, 0, held_bytes

    @property
    def most(self) -> Work:
        works = self._works[4:]
        return Work(
            sum(one.calls for one in works) // len(works),
            max(one.numbers for one in works),
            max(one.held_bytes for one in works),
        )


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    """Threads that begin meanwhile are watched."""
    watch, tensor = Counting(), torch.tensor

    def called(frame: Any, event: str, argument: Any) -> None:
        watch.calls += event == "call"

    def made(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        watch.numbers += len(data) if isinstance(data, list | tuple) else 1
        return tensor(data, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "tensor", made)
        threading.setprofile(called)
        tracemalloc.start()
        try:
            yield watch
        finally:
            tracemalloc.stop()
            threading.setprofile(None)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Core:
    return tiny_core(tmp_path_factory.mktemp("model") / "tiny", CAPACITY)


@contextmanager
def borrowed(core: Core, folder: Path, tokens: int) -> Iterator[RemoteRun]:
    """Room for so many at a holder in this process."""
    blocks = core.layout.blocks_of(tokens)
    memory = BlockMemory(core.layout, blocks)
    memory.tensor.zero_()
    model = HeldModel(fingerprint=core.info.fingerprint, scale=core.model.scale, windows=(WINDOW,) * LAYERS)
    held = Holder(memory, BlockAllocator(blocks), model, instance_id="holder")
    data = HolderData(held)
    server = DataServer(f"unix:{folder}/{tokens}.d", data, name="holder", session=data.attention.session)
    server.start()
    holder = RemoteHolder(
        "", server.address, owner="engine", model=core.info.fingerprint, lost=lambda refs: None
    )
    try:
        ref = held.lend("engine", "s", blocks, first_position=0, lease_s=600)
        yield RemoteRun(first_block=0, count=blocks, holder=holder, ref=ref)
    finally:
        holder.close_data()
        assert server.stop(scaled(5))


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name.lower())
def test_an_iteration_does_as_much_however_long_the_context(
    monkeypatch: pytest.MonkeyPatch, socket_folder: Path, core: Core, kind: Kind
) -> None:
    """Not a call, a number or a pointer for each block."""
    chunks = kind in (Kind.CHUNK_HERE, Kind.CHUNK_AWAY)
    works: list[Work] = []
    for context in (SHORT, LONG):
        end = context + (CHUNKS * BLOCK_TOKENS if chunks else TOKENS)
        with counting(monkeypatch) as watch, borrowed(core, socket_folder, end) as away:
            iterate(core, watch, kind, away, context, end)
        core.allocator.forget_cached()
        works.append(watch.most)
    short, long = works
    assert long.calls < short.calls + BLOCKS / 4
    assert long.numbers < short.numbers + BLOCKS / 4
    assert long.held_bytes < short.held_bytes + BLOCKS / 4 * POINTER_BYTES
