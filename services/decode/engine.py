"""Decode's loop, on a thread of its own: an iteration for each token of all running sequences.

Sequences are touched on this thread only, from `add` until their end. What others have to say comes as a
command between two iterations; what an iteration made goes out in one call of `EngineCallbacks.deliver`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import torch

from kvcommons.engine.batch import Batch
from kvcommons.engine.block_publisher import BlockPublisher
from kvcommons.engine.callbacks import EngineCallbacks, EngineMetrics, Movable, Step
from kvcommons.engine.core import Core
from kvcommons.engine.iteration import Iteration
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.engine.remote.attention import RemoteAttention
from kvcommons.engine.sequence import LocalRun, RemoteRun, Run, Sequence
from kvcommons.engine.slices import Here
from kvcommons.errors import CapacityExhausted, Internal, KVCommonsError, Unavailable
from kvcommons.holder.budget import AttentionBudget
from kvcommons.holder.creditor import Creditor
from kvcommons.holder.segments import SegmentRef
from kvcommons.pb import common_pb2 as pb
from kvcommons.placement.auto import Rates
from services.decode.scheduler import BatchScheduler, Plan, freed_by, plan_for
from services.decode.staggering.lanes import LANES, Lane, Lanes, Mode, Pipelining, share_of
from services.decode.staggering.pipelines import Division
from services.decode.staggering.rotation import Rotation

log = logging.getLogger(__name__)

SHORT_S = 0.02  # between looks whether a block has come free
SETTLE_S = 0.1  # blocks of a preempted sequence that are being saved come free within about this time


class DecodeEngine:
    """Runs sequences until stopped. Public methods may be called from any thread."""

    def __init__(
        self,
        core: Core,
        *,
        max_batch: int,
        may_borrow: bool,
        attend_deadline_s: float,
        rates: Rates,
        budget: AttentionBudget,
        keeper: BlockKeeper,
        callbacks: EngineCallbacks,
        metrics: EngineMetrics,
        pipelining: Mode = "auto",
        mini_batches: int = 0,
        rotation: Rotation | None = None,
    ) -> None:
        """`attend_deadline_s` bounds what an iteration waits for other holders. `rates` is told what was
        measured, `budget` of iterations: this process computes attention for others beside them.
        `pipelining`: whether two batches take turns; by itself where that pays. With `rotation` they, or the
        one of this instance, take turns with those of other instances instead."""
        self._rates = rates
        self._budget = budget
        self._core = core
        self._may_borrow = may_borrow
        self._attend_deadline_s = attend_deadline_s
        self._publisher = BlockPublisher(core, keeper, callbacks)
        self._callbacks = callbacks
        self._metrics = metrics
        self._scheduler = BatchScheduler(max_batch=max_batch)
        self._remote = RemoteAttention(core.layout, core.model.device, rates, budget, mini_batches)
        self._sequences: dict[int, Sequence] = {}
        self._pipelining = rotation or Pipelining(pipelining, core.layout.layers)
        turn = rotation.turn if rotation else None
        self._lanes = Lanes(core.model.device, self._post, self._land, turn)
        self._here = Here(core.model, self._lanes.turn)
        self._division = Division()
        self._steps: dict[int, Step] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._preempted_s = -SETTLE_S
        self._switches: list[tuple[Future[float | None], float]] = []
        self._thread = threading.Thread(target=self._run, name="decode-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends after the iteration under way; sequences that are left fail with Unavailable."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def running(self) -> int:
        return self._scheduler.running

    @property
    def queued(self) -> int:
        return self._scheduler.queued

    def add(self, sequence: Sequence) -> None:
        """The sequence holds its blocks; its prompt is on the way. From here on it is the engine's."""
        self._post(lambda: self._add(sequence))

    def begin(self, key: int, first: pb.SampledToken) -> None:
        """The prompt's KV is complete: the sequence joins at the next iteration."""
        self._post(lambda: self._begin(key, first))

    def cancel(self, key: int) -> None:
        """Frees the sequence within one iteration; nothing more is delivered."""
        self._post(lambda: self._cancel(key))

    def fail(self, key: int, error: KVCommonsError) -> None:
        """Ends the sequence with an error (its borrowed blocks are gone, its prompt did not come)."""
        self._post(lambda: self._fail(key, error))

    def grown(self, key: int, run: RemoteRun) -> None:
        """The answer to `borrow`."""
        self._post(lambda: self._grown(key, run))

    def refused(self, key: int) -> None:
        """The other answer to `borrow`: nobody lends."""
        self._post(lambda: self._refused(key))

    def survey(self, holder: Creditor | None = None) -> Future[list[Movable]]:
        """What could move, of one holder's or of all, oldest sequence first."""
        answer: Future[list[Movable]] = Future()
        self._post(lambda: answer.set_result(self._survey(holder)))
        return answer

    def switch(self, move: Movable, moved: Run, ref: SegmentRef) -> Future[float | None]:
        """From the next iteration on, the leading blocks of the run lie in `moved`, which has copies of them,
        and its other blocks are reached by `ref`. The seconds that the iteration waited for it, once it
        begins; None where the sequence has ended: `moved` is still the caller's then."""
        answer: Future[float | None] = Future()
        self._post(lambda: self._switch(move, moved, ref, answer))
        return answer

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
                    while commands:
                        commands.popleft()()
                    idle = not self._advance()
                except Exception:
                    log.exception("the engine's loop failed")
                    idle = True  # until something is posted: what fails for ever does not take a core
                    for key in list(self._sequences):
                        self._fail(key, Internal("decode failed unexpectedly; its log says why"))
                    with self._wake:  # those behind the one that failed: somebody may wait for them
                        self._commands.extendleft(reversed(commands))
                self._flush()
        self._lanes.close(2 * self._attend_deadline_s)
        for key in list(self._sequences):
            self._fail(key, Unavailable("this decode instance is stopping"))
        self._flush()
        for answer, _ in self._switches:
            answer.set_result(0.0)

    def _advance(self) -> bool:
        """What can begin now; False when nothing more can until something is posted."""
        if self._pipelining.batches(*self._load()) == 1:
            # Batches that took turns end first.
            return False if self._lanes.under_way else self._advance_one(self._lanes.all[0])
        if self._division.batches == 1:
            self._division.spread(LANES)
        for lane in self._lanes.all * 2:  # composing one may give sequences to the one before
            if lane.iteration is None:
                self._launch(lane)
        if not self._lanes.under_way:
            self._budget.idle()
        return False

    def _advance_one(self, lane: Lane) -> bool:
        """One iteration of all that can run, here and now."""
        if self._division.batches > 1:
            self._division = Division()
            self._lanes.rest()
        batch = self._compose(lane, self._plan_and_carry_out())
        if batch is None:
            self._budget.idle()
            return False
        iteration = self._iteration(lane, batch)
        try:
            tokens = iteration.run()
        except Exception:
            log.exception("an iteration failed", extra={"batch": len(batch.sequences)})
            tokens = None
        if tokens is not None:
            self._pipelining.ended(*self._load(), iteration, alone=True)
        self._finish(iteration, tokens)
        return True

    def _launch(self, lane: Lane) -> None:
        """The lane's next iteration, of its share of all that can run."""
        able = {key: self._sequences[key] for key in self._plan_and_carry_out()}
        batch = self._compose(lane, share_of(self._division, lane, able))
        if batch is None:
            lane.began_s = None
            return
        self._pipelining.took_staggered(*self._load(), lane)
        lane.launch(self._iteration(lane, batch))

    def _land(self, lane: Lane, tokens: list[pb.SampledToken] | None) -> None:
        iteration, lane.iteration = lane.iteration, None
        assert iteration is not None
        if tokens is not None:
            self._pipelining.ended(*self._load(), iteration, alone=False)
        self._finish(iteration, tokens)
        deferred, lane.deferred = lane.deferred, []
        for command in deferred:
            command()

    def _iteration(self, lane: Lane, batch: Batch) -> Iteration:
        slices = self._pipelining.slices(lane.number, self._here, unrotated=batch.has_heads)
        return Iteration(self._core, self._remote, batch, self._attend_deadline_s, self._rates, slices)

    def _load(self) -> tuple[int, int]:
        """Sequences that run, and their tokens."""
        lengths = [len(sequence.tokens) for sequence in self._sequences.values() if sequence.prompt_computed]
        return len(lengths), sum(lengths)

    def _compose(self, lane: Lane, keys: list[int]) -> Batch | None:
        sequences = [self._sequences[key] for key in keys]
        batch = lane.compose(sequences, self._core.block_tokens, self._core.model.device)
        for answer, began_s in self._switches:
            answer.set_result(time.monotonic() - began_s)
        self._switches.clear()
        return batch

    def _take_commands(self, *, wait: bool) -> deque[Callable[[], None]] | None:
        """What was posted; waits for something if there is nothing to compute. None when stopping."""
        with self._wake:
            if wait and not self._commands and not self._stopping:
                self._wake.wait(SHORT_S if self._scheduler.able else None)
            commands, self._commands = self._commands, deque()
            return None if self._stopping else commands

    def _add(self, sequence: Sequence) -> None:
        self._sequences[sequence.key] = sequence
        self._scheduler.reserve(sequence.key)

    def _begin(self, key: int, first: pb.SampledToken) -> None:
        sequence = self._sequences.get(key)
        if sequence is None:
            return
        reason = sequence.start(first.token)
        self._step(key).tokens.append(first)
        self._publisher.settle(sequence, prompt=True)
        if reason:
            self._end(key, reason=reason)
        else:
            self._scheduler.start(key)

    def _cancel(self, key: int) -> None:
        if key in self._sequences and not self._lanes.defer(key, lambda: self._cancel(key)):
            self._end(key)
            self._steps.pop(key, None)

    def _fail(self, key: int, error: KVCommonsError) -> None:
        if key in self._sequences and not self._lanes.defer(key, lambda: self._fail(key, error)):
            self._end(key, error=error)

    def _grown(self, key: int, run: RemoteRun) -> None:
        sequence = self._sequences.get(key)
        if sequence is None:
            self._callbacks.give_back([run])
            return
        sequence.append_run(run)
        sequence.refused = False
        self._lanes.changed()
        self._scheduler.borrowed(key)

    def _refused(self, key: int) -> None:
        if key not in self._sequences:
            return
        self._sequences[key].refused = True
        if not self._core.allocator.free:  # else there is room here
            self._preempt(self._scheduler.victim_for(key, freed_by(self._sequences)))
        self._scheduler.borrowed(key)

    def _survey(self, holder: Creditor | None) -> list[Movable]:
        return [
            Movable.of(sequence, run)
            for _, sequence in sorted(self._sequences.items())
            for run in sequence.remote_runs()
            if (holder is None or run.holder is holder) and sequence.movable(run)
        ]

    def _switch(self, move: Movable, moved: Run, ref: SegmentRef, answer: Future[float | None]) -> None:
        if self._lanes.defer(move.key, lambda: self._switch(move, moved, ref, answer)):
            return
        began_s = time.monotonic()
        sequence = self._sequences.get(move.key)
        if sequence is None or not sequence.move(move.run, moved, ref):
            answer.set_result(None)
            return
        if isinstance(moved, LocalRun):
            self._publisher.publish_moved(sequence, moved)
        self._lanes.changed()
        self._switches.append((answer, began_s))

    def _plan_and_carry_out(self) -> list[int]:
        """Who can run: those that have room for a token, and those that are being computed."""
        plan = plan_for(
            self._scheduler,
            self._sequences,
            free_blocks=self._core.allocator.free,
            may_borrow=self._may_borrow,
            may_preempt=time.monotonic() - self._preempted_s > SETTLE_S,
        )
        self._carry_out(plan)
        return [key for key in plan.batch if key in self._sequences and not self._sequences[key].full]

    def _carry_out(self, plan: Plan) -> None:
        for key in plan.preempt:
            self._preempt(key)
        for key in plan.borrow:
            sequence = self._sequences[key]
            sequence.on_behalf(self._callbacks.borrow, sequence)
        for key in plan.grow:
            sequence = self._sequences[key]
            try:
                blocks = self._core.allocator.allocate(1)
            except CapacityExhausted:  # a new sequence was quicker: the next iteration decides anew
                continue
            sequence.append_run(LocalRun(first_block=sequence.blocks, blocks=blocks))
            sequence.refused = False
            self._lanes.changed()

    def _preempt(self, key: int) -> None:
        self._preempted_s = time.monotonic()
        self._fail(
            key,
            CapacityExhausted(
                "this decode instance has no block left and gives older sequences precedence: "
                "go on elsewhere, or here when there is room",
                retry_after_ms=200,
            ),
        )

    def _finish(self, iteration: Iteration, tokens: list[pb.SampledToken] | None) -> None:
        """What an iteration made; nothing where it failed."""
        batch = iteration.batch
        if tokens is None:
            for sequence in batch.sequences:
                self._fail(sequence.key, Internal("decode failed in an iteration; its log says why"))
            return
        for row, (sequence, token) in enumerate(zip(batch.sequences, tokens, strict=True)):
            if row in iteration.lost:
                self._fail(sequence.key, iteration.lost[row])
                continue
            self._step(sequence.key).tokens.append(token)
            reason = sequence.append(token.token)
            self._publisher.settle(sequence)
            if reason:
                self._end(sequence.key, reason=reason)
        self._budget.iterated(iteration.timing.seconds)
        self._metrics.iteration(len(batch.sequences), iteration.timing)

    def _end(self, key: int, *, reason: str = "", error: KVCommonsError | None = None) -> None:
        """The sequence holds nothing any more; what it published stays in the device tier."""
        sequence = self._sequences.pop(key)
        self._scheduler.remove(key)
        self._division.leave(key)
        sequence.ended = True
        self._core.allocator.release(sequence.local_blocks())
        remote = sequence.remote_runs()
        if remote:
            sequence.on_behalf(self._callbacks.give_back, remote)
        step = self._step(key)
        step.reason, step.error, step.saved_blocks = reason, error, sequence.saved_blocks
        if reason or error is not None:
            self._metrics.ended(step)

    def _step(self, key: int) -> Step:
        return self._steps.setdefault(key, Step(key=key))

    def _flush(self) -> None:
        if self._steps:
            steps, self._steps = self._steps, {}
            self._callbacks.deliver(list(steps.values()))
