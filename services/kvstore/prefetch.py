"""Fetches blocks from disk to DRAM ahead of their use, on a thread of its own: the histories of turns that
have begun, then what routers hinted.

It works through the window of the hints in the order of use, a batch at a time and only when the one before
has come, so that a request that waits for its blocks is never behind more than a batch. What it makes room
for never drives out a block that is itself expected.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from services.kvstore.block import Block
from services.kvstore.catalog import Catalog
from services.kvstore.clock import Clock
from services.kvstore.expected import ExpectedUse
from services.kvstore.loader import BlockLoad

log = logging.getLogger(__name__)

BATCH_BYTES = 8 << 20
_LOAD_S_MAX = 10.0  # of a batch; a disk that takes longer has other troubles
_POLL_S = 1.0  # between looks for hints that ran out
_BEGUN_MAX = 16  # turns; the history of one more comes when it is asked for


class _BegunTurn(NamedTuple):
    model: bytes
    left: Iterator[bytes]  # blocks of its history that were not looked at yet


class Prefetcher:
    """`start_loads` reads pinned blocks of one model from disk, as for a request."""

    def __init__(
        self,
        catalog: Catalog,
        lock: threading.Lock,
        clock: Clock,
        *,
        begin_load: Callable[[Block, threading.Condition], BlockLoad],
        start_loads: Callable[[bytes, list[Block], int], None],
    ) -> None:
        self._catalog = catalog
        self._hints = catalog.evictor.hints
        self._lock = lock
        self._wake = threading.Condition(lock)
        self._clock = clock
        self._begin_load = begin_load
        self._start_loads = start_loads
        self._begun: deque[_BegunTurn] = deque(maxlen=_BEGUN_MAX)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvstore-prefetch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        with self._lock:
            self._stopping = True
            self._wake.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def begin(self, model: bytes, block_ids: Sequence[bytes]) -> None:
        """A turn has begun that will likely read these blocks in a moment: meanwhile its router renders the
        prompt, asks what is stored, and finds room for it."""
        if not self._catalog.looks_ahead or not block_ids:
            return
        with self._lock:
            ids = block_ids[: self._catalog.kept_blocks(model, len(block_ids))]
            self._begun.append(_BegunTurn(model, iter(ids)))
            self._wake.notify_all()

    def hint(self, router: str, uses: Sequence[tuple[bytes, Sequence[bytes], float]], ttl_s: float) -> int:
        """Takes a router's look-ahead: (model, block ids, seconds until the start). How many uses it
        remembers."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            expected = [ExpectedUse(model=m, block_ids=ids, at_s=now_s + in_s) for m, ids, in_s in uses]
            accepted = self._hints.put(router, expected, now_s=now_s, ttl_s=ttl_s)
            self._wake.notify_all()
            return accepted

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._stopping:
                    return
            loads = self.step()
            with self._lock:
                # A turn that began since then has woken nobody.
                if not loads and not self._begun and not self._stopping:
                    self._wake.wait(_POLL_S if len(self._hints) else None)
            self._await(loads)

    def step(self) -> list[BlockLoad]:
        """Begins to fetch the next batch; empty where there is nothing to fetch, or no room for it."""
        condition = threading.Condition()
        with self._lock:
            self._hints.expire(self._clock.monotonic_s())
            batch = self._pin_begun(condition) or self._pin_hinted(condition)
            loads = [block.load for block in batch if block.load is not None]
        if batch:
            try:
                self._start_loads(batch[0].space.shape.model, batch, 0)
            except Exception:
                log.exception("blocks could not be fetched ahead of use")
        return loads

    def _pin_begun(self, condition: threading.Condition) -> list[Block]:
        """The next blocks of the turn that has begun first and has any left to fetch."""
        batch: list[Block] = []
        size = 0
        while self._begun and not batch:
            turn = self._begun[0]
            for block_id in turn.left:
                block = self._catalog.find(turn.model, block_id)
                if block is not None and block.dram is not None:
                    continue
                if block is None or not self._pin(block, condition):
                    self._begun.popleft()
                    break
                batch.append(block)
                size += block.space.shape.slot_bytes
                if size >= BATCH_BYTES:
                    break
            else:
                self._begun.popleft()
        return batch

    def _pin_hinted(self, condition: threading.Condition) -> list[Block]:
        """The next blocks of what is hinted, all of one model."""
        batch: list[Block] = []
        window = self._hints.window() if self._catalog.looks_ahead else {}
        size = 0
        for use in self._hints.upcoming():
            wanted = window.get(use.model, {})
            for block_id in use.block_ids:
                block = self._catalog.find(use.model, block_id)
                if block is None or block_id not in wanted:
                    break  # without it those after it are of no use
                if block.dram is not None or (batch and block.space is not batch[0].space):
                    continue
                size += block.space.shape.slot_bytes
                if (batch and size > BATCH_BYTES) or not self._pin(block, condition):
                    return batch
                batch.append(block)
        return batch

    def _pin(self, block: Block, condition: threading.Condition) -> bool:
        """Whether there is room for a block that is on disk: its load keeps it pinned then."""
        if not self._catalog.pin(block, sparing=True):
            return False
        self._begin_load(block, condition)
        self._catalog.unpin(block)
        self._catalog.counters.prefetched += 1
        return True

    def _await(self, loads: Sequence[BlockLoad]) -> None:
        give_up_s = time.monotonic() + _LOAD_S_MAX
        for load in loads:
            load.wait_over(max(0.0, give_up_s - time.monotonic()))
