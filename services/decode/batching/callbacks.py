"""The way from the engine's thread to the event loop: one call an iteration, whatever the batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvcommons.engine.callbacks import SequenceUpdate
from kvcommons.engine.engine import Engine
from kvcommons.engine.sequence import RemoteRun, Sequence
from kvcommons.errors import KVCommonsError
from kvcommons.holder.copying import BlockSave
from kvcommons.holder.head_group import Creditor
from kvcommons.placement.base import Next
from services.decode.arrival.arrivals import Arrivals
from services.decode.borrowing.loans import Loans


class LoopCallbacks:
    """The engine's EngineCallbacks. Made on the event loop, then connected to what it serves."""

    def __init__(self, *, borrow_blocks: int) -> None:
        """`borrow_blocks` are asked for at once when a sequence grows elsewhere."""
        self._borrow_blocks = borrow_blocks
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._engine: Engine
        self._arrivals: Arrivals
        self._loans: Loans

    def connect(self, engine: Engine, arrivals: Arrivals, loans: Loans) -> None:
        self._engine, self._arrivals, self._loans = engine, arrivals, loans

    def deliver(self, steps: list[SequenceUpdate]) -> None:
        self._on_loop(self._deliver, steps)

    def borrow(self, sequence: Sequence) -> None:
        tail = sequence.tail if isinstance(sequence.tail, RemoteRun) else None
        avoid: list[Creditor] = []
        if sequence.next_block() is Next.NEW_HOLDER:
            tail, avoid = None, [run.holder for run in sequence.remote_runs()]
        request_id, blocks = sequence.request.request_id, sequence.blocks
        self._on_loop(self._borrow, sequence.key, request_id, tail, avoid, blocks)

    def give_back(self, runs: list[RemoteRun]) -> None:
        self._on_loop(self._loans.give_back, list(runs))

    def save_remote(self, run: RemoteRun, sequence: Sequence, index: int) -> None:
        request, ids = sequence.request, sequence.chain.ids
        block = BlockSave(
            store=request.store_data,
            tenant=request.tenant,
            parent=ids[index - 1] if index else b"",
            block_ids=[ids[index]],
            first_block=run.segment_block + index - run.first_block,
            first_index=index,
        )
        self._on_loop(self._loans.save, run, block)

    # From here on everything runs on the event loop.

    def _on_loop(self, work: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(work, *arguments)

    def _deliver(self, steps: list[SequenceUpdate]) -> None:
        for step in steps:
            arrival = self._arrivals.find(step.key)
            if arrival is not None:
                arrival.stream.step(step)

    def _borrow(
        self, key: int, request_id: str, tail: RemoteRun | None, avoid: list[Creditor], blocks: int
    ) -> None:
        task = self._loop.create_task(self._extend(key, request_id, tail, avoid, blocks))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _extend(
        self, key: int, request_id: str, tail: RemoteRun | None, avoid: list[Creditor], blocks: int
    ) -> None:
        try:
            run = await self._loans.extend(
                key, request_id, tail=tail, avoid=avoid, blocks=self._borrow_blocks, first_block=blocks
            )
        except KVCommonsError:
            self._engine.refused(key)
        else:
            self._engine.grown(key, run)
