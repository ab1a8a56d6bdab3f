"""A job's history from the store: how much of it is loaded, when, and what becomes of a load that falls
behind (AttentionStore, section 3.2.1)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from kvcommons.engine.core import Core
from kvcommons.engine.history import Histories
from kvcommons.transport.deadline import Deadline
from services.prefill.active import Active
from services.prefill.cost import LoadOrCompute
from services.prefill.job import Job
from services.prefill.read_buffer import ReadBuffer

log = logging.getLogger(__name__)

LOAD_S_MAX = 60.0  # of one load, the time included in which it is held back
LOOK_S = 0.1  # between looks at a load that is waited for


class LoadFellShort(Exception):
    """Only the first `blocks` of the history that a job waits for can be had, or (`given_up`) are worth
    waiting for."""

    def __init__(self, blocks: int, *, given_up: bool) -> None:
        self.blocks = blocks
        self.given_up = given_up


class Preloading:
    """Loads of jobs, on the engine's thread."""

    def __init__(
        self, core: Core, histories: Histories, cost: LoadOrCompute, read_buffer: ReadBuffer
    ) -> None:
        self._core = core
        self._histories = histories
        self._cost = cost
        self.read_buffer = read_buffer

    def decide(self, job: Job) -> None:
        """How many of the blocks that the store has are loaded: `job.loaded_blocks`."""
        blocks = job.loadable_blocks()
        if blocks and not job.lacks_history:
            blocks = self._cost.blocks_to_load(
                blocks,
                block_bytes=self._core.layout.block_bytes,
                block_tokens=job.block_tokens,
                new_tokens=job.tokens - (job.device_blocks + blocks) * job.block_tokens,
            )
        job.loaded_blocks = blocks

    def begin(self, active: Active, others: Iterable[Active]) -> None:
        """As many layers as the read buffer has for the job. `others` may hold parts of it."""
        job, layout = active.job, self._core.layout
        first, end = job.device_blocks, job.reused_blocks
        size = job.loaded_blocks * layout.block_bytes
        ahead = self.read_buffer.layers_ahead(
            self._cost,
            history_bytes=size,
            new_tokens=job.tokens_left,
            held_bytes=sum(other.ahead_bytes for other in others),
        )
        active.ahead_bytes = ahead * size // layout.layers
        active.load = self._histories.load(
            store=job.request.store_data,
            ids=job.ids[first:end],
            blocks=job.blocks[first:end],
            deadline=Deadline.after(min(LOAD_S_MAX, job.deadline_s - time.monotonic())),
            ahead=ahead,
        )

    def release(self, active: Active) -> None:
        """The job's turn has come: what it loads from here on is in no read buffer."""
        if active.load is not None and not active.released:
            active.released = True
            active.ahead_bytes = 0
            active.load.release()

    def ready(self, active: Active) -> bool:
        """Whether the job's chunk would not begin by waiting."""
        if active.load is None or active.load.arrived(self.read_buffer.first_use):
            return True
        return active.released and not self._patience_s(active)

    def wait_a_moment(self, active: Active, within_s: float) -> None:
        """There is nothing to compute but this job."""
        self.release(active)
        self._wait(active, self.read_buffer.first_use, within_s)

    def await_layer(self, active: Active, layer: int) -> None:
        """Until this layer of the job's history is there. Raises LoadFellShort."""
        job, load = active.job, active.load
        assert load is not None
        while not load.arrived(layer):
            patience_s = self._patience_s(active)
            if not patience_s:
                raise LoadFellShort(self._worth_keeping(active), given_up=not load.ended)
            self._wait(active, layer, min(patience_s, LOOK_S))
        blocks = load.wait(layer, Deadline.after(0))
        if blocks < job.loaded_blocks:
            raise LoadFellShort(blocks, given_up=False)

    def ended(self, active: Active) -> None:
        """All layers were waited for."""
        load, active.load = active.load, None
        assert load is not None
        if active.job.loaded_blocks:
            self._cost.loaded(load.bytes, load.seconds)

    def set_back(self, active: Active, short: LoadFellShort) -> None:
        """Goes on with fewer blocks; when this returns, nothing writes to the others any more."""
        job, load = active.job, active.load
        assert load is not None
        log.info(
            "history fell short",
            extra={
                "attempt": job.request.request_id,
                "wanted": job.loaded_blocks,
                "loaded": short.blocks,
                "given_up": short.given_up,
            },
        )
        job.set_back(short.blocks)
        if not short.given_up:  # else the store has them, if slowly
            job.save_from = min(job.save_from, job.reused_blocks)
        active.waited_before_s = job.load_wait_s
        if short.blocks:
            load.narrow(short.blocks)
        else:
            load.cancel()
            active.load = None

    def _wait(self, active: Active, layer: int, within_s: float) -> None:
        assert active.load is not None
        before = time.monotonic()
        active.load.arrived(layer, within_s)
        active.job.load_wait_s += time.monotonic() - before

    def _patience_s(self, active: Active) -> float:
        """How much longer to wait for the next layer."""
        job, load = active.job, active.load
        assert load is not None
        if load.ended:
            return 0.0
        return self._cost.patience_s(
            tokens=job.tokens if job.needs_loaded else job.loaded_blocks * job.block_tokens,
            waited_s=job.load_wait_s - active.waited_before_s,
            pace_s=self._pace_s(active),
            layers_left=self._core.layout.layers - load.layers_arrived,
        )

    def _pace_s(self, active: Active) -> float:
        """What a layer of the blocks that are still loaded takes, by those that came; 0 where none has."""
        load = active.load
        assert load is not None
        whole = load.bytes // self._core.layout.block_bytes
        return load.pace_s * active.job.loaded_blocks / whole

    def _worth_keeping(self, active: Active) -> int:
        """Of a load that fell behind."""
        job, load = active.job, active.load
        assert load is not None
        arrived, layers = load.layers_arrived, self._core.layout.layers
        # It was no faster than this, which the next decision should know.
        self._cost.loaded(load.bytes * max(arrived, 1) // layers, max(load.seconds, job.load_wait_s))
        if load.ended or job.needs_loaded:
            return 0
        return self._cost.blocks_to_keep(
            job.loaded_blocks,
            block_tokens=job.block_tokens,
            new_tokens=job.tokens_left,
            pace_s=self._pace_s(active),
            layers_left=layers - arrived,
        )
