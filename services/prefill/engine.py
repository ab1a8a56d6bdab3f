"""Prefill's loop, on a thread of its own: admit jobs, compute a chunk of one, hand over what came of it.

Everything a job holds is touched on this thread only. What others have to say (a new job, a cancellation,
history that arrived) comes as a command between two chunks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import copy_context

import torch

from kvcommons.engine.chunk import Chunk
from kvcommons.engine.core import Core
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.errors import CapacityExhausted, DeadlineExceeded, Internal, KVCommonsError, Unavailable
from kvcommons.model.sampling import SamplingRow, sample
from kvcommons.telemetry.trace import Tracer
from services.prefill.active import Active, Listener
from services.prefill.cost import LoadOrCompute
from services.prefill.handover import Handover
from services.prefill.job import First, Job
from services.prefill.preloading import LoadFellShort, Preloading
from services.prefill.push import Delivery, Pusher
from services.prefill.scheduler import JobScheduler
from services.prefill.spread import NOT_HERE, Holders, SpreadChunk, leave_window, take_window

log = logging.getLogger(__name__)

POLL_S = 0.1  # while jobs wait for memory or their deadline
LOAD_POLL_S = 0.005  # while jobs wait for history; commands are seen as often


class PrefillEngine:
    """Runs jobs until stopped. All methods may be called from any thread."""

    def __init__(
        self,
        core: Core,
        *,
        chunk_tokens: int,
        max_running: int,
        max_queue: int,
        pusher: Pusher,
        keeper: BlockKeeper,
        cost: LoadOrCompute,
        preloading: Preloading,
        holders: Holders,
        tracer: Tracer,
    ) -> None:
        assert chunk_tokens % core.block_tokens == 0
        self._core = core
        self._chunk_tokens = chunk_tokens
        # Of a spread job: its next chunk has room while the last one's blocks are on their way out.
        self._window_tokens = min(chunk_tokens, max(core.allocator.total // 2, 1) * core.block_tokens)
        self._pusher = pusher
        self._handover = Handover(pusher, keeper)
        self._preloading = preloading
        self._holders = holders
        self._tracer = tracer
        self._scheduler = JobScheduler(max_queue=max_queue, max_running=max_running)
        self._cost = cost
        self._jobs: dict[int, Active] = {}
        self._claims: dict[bytes, int] = {}  # blocks that a running job is about to publish
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="prefill-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends after the chunk under way; jobs that are left fail with Unavailable."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def running(self) -> int:
        return self._scheduler.running

    @property
    def waiting(self) -> int:
        return self._scheduler.waiting

    def submit(self, job: Job, delivery: Delivery, listener: Listener) -> None:
        """Queues a job of the call under way here; whatever becomes of it is told to `listener`."""
        active = Active(job=job, delivery=delivery, listener=listener, origin=copy_context())
        self._post(lambda: self._submit(active))

    def cancel(self, key: int) -> None:
        """Ends a job at the next chunk's border, if it has not ended; its listener hears no more."""
        self._post(lambda: self._cancel(key))

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    # Below: the engine's thread.

    def _run(self) -> None:
        with torch.inference_mode():
            idle = True
            while (commands := self._take_commands(wait=idle)) is not None:
                try:
                    for command in commands:
                        command()
                    idle = not self._advance()
                except Exception:
                    log.exception("the engine's loop failed")
                    for active in list(self._jobs.values()):
                        self._fail(active, Internal("prefill failed unexpectedly; its log says why"))
        for active in list(self._jobs.values()):
            self._fail(active, Unavailable("this prefill instance is stopping"))

    def _advance(self) -> bool:
        """One chunk, or a short wait for history; False when there is nothing to do for now."""
        self._expire()
        self._admit()
        key = self._scheduler.next(self._ready)
        if key is not None:
            active = self._jobs[key]
            active.origin.run(self._step, active)
            return True
        return self._await_any_history()

    def _take_commands(self, *, wait: bool) -> deque[Callable[[], None]] | None:
        """What was posted; waits for something if there is nothing to compute. None when stopping."""
        with self._wake:
            if wait and not self._commands and not self._stopping:
                self._wake.wait(POLL_S if self._jobs else None)
            commands, self._commands = self._commands, deque()
            return None if self._stopping else commands

    def _submit(self, active: Active) -> None:
        job = active.job
        try:
            if job.total_blocks > self._core.allocator.total and not job.spread:
                raise CapacityExhausted(
                    f"the prompt needs {job.total_blocks} blocks and this prefill instance has "
                    f"{self._core.allocator.total}: raise its capacity_tokens"
                )
            self._scheduler.submit(job.key, tokens=job.tokens, deadline_s=job.deadline_s)
        except KVCommonsError as error:
            active.listener(error)
            return
        self._jobs[job.key] = active

    def _cancel(self, key: int) -> None:
        active = self._jobs.get(key)
        if active is not None:
            active.delivery.abandon(Unavailable("the job was cancelled"))
            self._release(active)

    def _expire(self) -> None:
        for key in self._scheduler.expired(time.monotonic()):
            self._fail(self._jobs[key], DeadlineExceeded("the prompt was not computed within its deadline"))

    def _admit(self) -> None:
        progress = True
        while progress:
            progress = False
            for key in self._scheduler.admissible():
                active = self._jobs[key]
                try:
                    taken = self._take_blocks(active)
                except CapacityExhausted:
                    if self._handover.make_room():
                        progress = True  # what waited to be saved is in the way of no job
                    break  # the first in line has the next claim on memory
                if taken:
                    active.origin.run(self._begin, active)
                    progress = True
                    break

    def _take_blocks(self, active: Active) -> bool:
        """Finds what can be reused and allocates the rest. False while another job makes a block it needs
        next.

        Raises CapacityExhausted when there is no room for the rest.
        """
        job, allocator = active.job, self._core.allocator
        if job.spread:
            job.blocks = [NOT_HERE] * job.total_blocks
            take_window(job, allocator, self._next_chunk(job))
            return True
        reusable = job.reusable()
        found = allocator.match(reusable)
        if len(found) < len(reusable) and reusable[len(found)] in self._claims:
            allocator.release(found)
            return False
        try:
            job.blocks = found + allocator.allocate(job.total_blocks - len(found))
        except CapacityExhausted:
            allocator.release(found)
            raise
        job.device_blocks = len(found)
        job.done_tokens = len(found) * job.block_tokens
        self._preloading.decide(job)
        job.done_tokens = job.reused_tokens
        return True

    def _begin(self, active: Active) -> None:
        job = active.job
        job.save_from = job.request.matched_blocks
        if job.spread:  # what decode did not get is not there
            job.save_from = min(job.save_from, job.placed_blocks)
        if not job.request.no_reuse and not job.spread:
            for identity in job.ids[job.device_blocks :]:
                self._claims.setdefault(identity, job.key)
        if job.loaded_blocks:
            self._preloading.begin(active, self._jobs.values())
            if not self._scheduler.running:
                self._preloading.release(active)
        job.admitted_s = time.monotonic()
        self._scheduler.admit(job.key, tokens_left=job.tokens_left)
        for layer in range(self._core.layout.layers):
            self._handover.save(job, layer, range(min(job.device_blocks, len(job.ids))))
        active.listener(int((job.admitted_s - job.submitted_s) * 1e6))

    def _ready(self, key: int) -> bool:
        return self._preloading.ready(self._jobs[key])

    def _await_any_history(self) -> bool:
        """Waits a moment for the oldest job's history; False where no job waits for any."""
        for active in self._jobs.values():
            if active.load is not None:
                self._preloading.wait_a_moment(active, LOAD_POLL_S)
                return True
        return False

    def _step(self, active: Active) -> None:
        job = active.job
        failure = active.delivery.failure
        if failure is not None:
            self._fail(active, failure)
            return
        self._preloading.release(active)
        try:
            job.check_history()
            if job.spread and not self._open_window(active):
                return
            with self._tracer.span("prefill chunk"):
                logits = self._compute(active, self._next_chunk(job))
        except LoadFellShort as short:
            self._preloading.set_back(active, short)
            self._scheduler.progress(job.key, tokens_left=job.tokens_left)
            return
        except KVCommonsError as error:
            self._fail(active, error)
            return
        except Exception:
            log.exception("a chunk failed", extra={"attempt": job.request.request_id})
            self._fail(active, Internal("prefill failed to compute the prompt; its log says why"))
            return
        if job.spread:
            leave_window(job, self._core.allocator)
        else:
            self._publish(job)
        if logits is None:
            self._scheduler.progress(job.key, tokens_left=job.tokens_left)
            return
        self._finish(active, logits)

    def _next_chunk(self, job: Job) -> range:
        return job.chunk(self._window_tokens if job.spread else self._chunk_tokens)

    def _open_window(self, active: Active) -> bool:
        """What a spread job has computed is where it is attended over, and its next chunk has room here;
        False where room is still on its way out."""
        active.delivery.await_arrival()
        try:
            take_window(active.job, self._core.allocator, self._next_chunk(active.job))
        except CapacityExhausted:
            if not self._handover.make_room():
                time.sleep(LOAD_POLL_S)
            return False
        return True

    def _compute(self, active: Active, positions: range) -> torch.Tensor | None:
        """Logits [1, vocab] of the last token, after a job's last chunk."""
        job, core = active.job, self._core
        started, waited = time.monotonic(), job.load_wait_s
        covered = job.covered_blocks(positions)
        full = range(covered.start, min(covered.stop, len(job.ids)))
        last = positions.stop == job.tokens
        # What was found goes out with the first chunk: a layer is one message a holder.
        pushed = range(covered.start if positions.start > job.reused_tokens else 0, covered.stop)
        if job.spread:
            chunk: Chunk = SpreadChunk(core, job.request.tokens, positions, job, self._holders)
        else:
            chunk = Chunk(core, job.request.tokens, positions, job.blocks, job.request.truncated)
        early = active.load is None  # saved at once; else when the history is known to be whole
        for layer in range(core.layout.layers):
            self._await_history(active, layer)
            chunk.write(layer)
            self._handover.push(job, active.delivery, layer, pushed)
            if early:
                self._handover.save(job, layer, full)
            if last or layer < core.layout.layers - 1:
                chunk.attend(layer)
        if active.load is not None:
            self._preloading.ended(active)
        if not early:
            for layer in range(core.layout.layers):
                self._handover.save(job, layer, full)
        logits = chunk.logits() if last else None
        job.done_tokens = positions.stop
        seconds = time.monotonic() - started - (job.load_wait_s - waited)
        job.compute_s += seconds
        self._cost.computed(len(positions), seconds)
        return logits

    def _await_history(self, active: Active, layer: int) -> None:
        """Raises LoadFellShort."""
        job = active.job
        if active.load is not None and job.loaded_blocks:
            self._preloading.await_layer(active, layer)

    def _publish(self, job: Job) -> None:
        """Computed and loaded full blocks join the device tier."""
        if job.request.no_reuse:
            return
        for index in range(job.device_blocks, job.done_tokens // job.block_tokens):
            self._core.allocator.publish(job.blocks[index], job.ids[index])
            if self._claims.get(job.ids[index]) == job.key:
                del self._claims[job.ids[index]]

    def _finish(self, active: Active, logits: torch.Tensor) -> None:
        job, delivery = active.job, active.delivery
        row = SamplingRow(params=job.request.sampling, position=job.tokens, generated=job.generated())
        token = sample(logits, [row])[0]
        first = First(
            token=token,
            cached_tokens=job.reused_tokens,
            device_tokens=job.device_blocks * job.block_tokens,
            queue_us=int((job.admitted_s - job.submitted_s) * 1e6),
            compute_us=int(job.compute_s * 1e6),
            load_wait_us=int(job.load_wait_s * 1e6),
        )
        listener = active.listener
        self._release(active)

        def acknowledged(failure: KVCommonsError | None) -> None:
            listener(failure or first)

        def pushed(failure: KVCommonsError | None) -> None:
            if failure is not None or not job.targets:
                acknowledged(failure)
            else:
                self._pusher.start_sequence(
                    delivery, job.targets[0], token, job.push_from_block, acknowledged
                )

        delivery.seal(pushed)

    def _fail(self, active: Active, error: KVCommonsError) -> None:
        active.delivery.abandon(error)
        self._release(active)
        active.listener(error)

    def _release(self, active: Active) -> None:
        """The job holds nothing any more; what it published stays in the device tier."""
        job = active.job
        if active.load is not None:
            active.load.cancel()
        self._scheduler.remove(job.key)
        del self._jobs[job.key]
        for identity in job.ids:
            if self._claims.get(identity) == job.key:
                del self._claims[identity]
        self._core.allocator.release([block for block in job.blocks if block != NOT_HERE])
        job.blocks = []
