"""The engine: one loop on a thread of its own, for prompts that are computed here and for sequences that
generate here.

Sequences are touched on this thread only, from the moment they are handed in until their end. What others
have to say comes as a command between two iterations, or between two layers of one; what an iteration made
goes out in one call of `EngineCallbacks.deliver`, or to a prompt's sink. Prefill and decode differ in what is
plugged in: where new KV goes and what becomes of a finished prompt (`PromptSink`), who lends
(`EngineCallbacks`), how iterations are carried out (`Executor`).

The loop (`_run`), again and again:

1. takes the commands that came (`_serve`);
2. ends prompts whose deadline has passed, and gives memory to those that are next (`Prompts.admit`);
3. has the executor advance (`Executor.advance`): it makes room for a token of each sequence that generates
   (`make_room`: preempts, allocates, asks for loans), takes the spans of prompts beside them (`spans`), runs
   an `Iteration` of both (`Iteration.run`), with `between_layers` after each layer or, where its rows attend
   here alone, after some of them, and hands in what it made (`take_results`: appends tokens, publishes and
   saves full blocks, ends what has ended);
4. delivers it (`_flush`), and waits for commands where nothing could be computed.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch

from kvcommons.engine.block_publisher import BlockPublisher
from kvcommons.engine.callbacks import EngineCallbacks, EngineMetrics, Movable, SequenceUpdate
from kvcommons.engine.core import Core
from kvcommons.engine.core_lock import CoreLock
from kvcommons.engine.cores import Cores
from kvcommons.engine.drafts.speculation import Speculation
from kvcommons.engine.executor import Executor
from kvcommons.engine.iteration import Iteration
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.engine.mailbox import Command, Mailbox, reply
from kvcommons.engine.predictor import Predictor
from kvcommons.engine.prompt import Prompt
from kvcommons.engine.prompts import Prompts, PromptSpan
from kvcommons.engine.scheduler import Plan, Scheduler, freed_by, plan_for
from kvcommons.engine.sequence import LocalRun, RemoteRun, Run
from kvcommons.engine.sequence import Sequence as Generating
from kvcommons.engine.token_rows import TokenRows
from kvcommons.errors import (
    CapacityExhausted,
    DeadlineExceeded,
    Internal,
    KVCommonsError,
    Unavailable,
    from_detail,
)
from kvcommons.holder.budget import AttentionBudget
from kvcommons.holder.head_group import Creditor
from kvcommons.holder.segments import SegmentRef
from kvcommons.pb import common_pb2 as pb
from kvcommons.placement.base import Next

log = logging.getLogger(__name__)

SHORT_S = 0.02  # between looks whether a block has come free
POLL_S = 0.1  # while prompts wait for memory or their deadline
PREEMPT_PAUSE_S = 0.1  # blocks of a preempted sequence that are being saved come free within about this time
RESERVING_S = 2.0  # nobody gives way for so long at most, where a reservation under way may fall through


class Engine:
    """Runs until stopped. Public methods may be called from any thread."""

    def __init__(
        self,
        core: Core,
        *,
        scheduler: Scheduler,
        executor: Executor,
        prompts: Prompts | None,
        may_borrow: bool,
        budget: AttentionBudget,
        keeper: BlockKeeper,
        callbacks: EngineCallbacks,
        metrics: EngineMetrics,
        predictor: Predictor | None = None,
        speculation: Speculation | None = None,
        core_lock: CoreLock | None = None,
        shares: bool = True,
    ) -> None:
        """`prompts`: None where none are computed here; `predictor`: theirs, where there are any. `budget`
        takes how long iterations are: this process computes attention for others beside them. `speculation`:
        where drafts are verified, by the same predictor. `core_lock`: where other engines of the host share
        its cores. `shares`: whether a prompt that comes here has the blocks of an equal one that is here,
        instead of its own."""
        self._core = core
        self._scheduler = scheduler
        self._executor = executor
        self._prompts = prompts
        self._may_borrow = may_borrow
        self._budget = budget
        self._publisher = BlockPublisher(core, keeper, callbacks, shares=shares)
        self._callbacks = callbacks
        self._metrics = metrics
        self._cores = Cores(core.backend.device, budget, core_lock)
        self._speculation = speculation
        self.predictor = predictor or (prompts.predictor if prompts is not None else Predictor())
        self._sequences: dict[int, Generating] = {}
        self._steps: dict[int, SequenceUpdate] = {}
        self._drafting_s = 0.0  # that the last drafts took
        self._preempted_s = -PREEMPT_PAUSE_S
        self._reservations = self._reserved = 0  # begun, and ended
        self._reserving_s = 0.0  # since when there is always one under way
        self._switches: list[tuple[Future[float | None], float]] = []
        self._mailbox = Mailbox()
        self._keys = itertools.count(1)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends after the iteration under way, or between two layers of one that computes prompts only;
        sequences that are left fail with Unavailable."""
        self._mailbox.close()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def new_key(self) -> int:
        """For a sequence that is about to be handed in: a smaller one is older."""
        return next(self._keys)

    @property
    def running(self) -> int:
        """Sequences that generate, as many as fit the batch."""
        return self._scheduler.running

    @property
    def queued(self) -> int:
        """Sequences that generate, beyond the batch."""
        return self._scheduler.queued

    @property
    def computing(self) -> int:
        """Prompts that hold memory."""
        return self._scheduler.computing

    @property
    def waiting(self) -> int:
        """Prompts that wait for memory."""
        return self._scheduler.waiting

    def submit(self, prompt: Prompt) -> None:
        """Queues a prompt to be computed here; whatever becomes of it, its sink hears. Unless it is refused
        it is the engine's from here on."""
        self.post(lambda: self._submit(prompt))

    def add(self, sequence: Generating) -> None:
        """The sequence holds its blocks; its prompt is computed elsewhere. From here on it is the
        engine's."""
        self.post(lambda: self._add(sequence))

    def begin(self, key: int, first: pb.SampledToken) -> None:
        """The prompt's KV is complete: the sequence joins at the next iteration."""
        self.post(lambda: self._begin(key, first))

    def cancel(self, key: int) -> None:
        """Frees the sequence at the end of an iteration in which it generates, else between two layers;
        nothing more is heard of it."""
        self.post(lambda: self._cancel(key))

    def fail(self, key: int, error: KVCommonsError) -> None:
        """Ends the sequence with an error (its borrowed blocks are gone, its prompt did not come)."""
        self.post(lambda: self._fail(key, error))

    def grown(self, key: int, run: Run) -> None:
        """The answer to `EngineCallbacks.borrow`, or more room for a prompt that is computed elsewhere."""
        self.post(lambda: self._grown(key, run))

    def refused(self, key: int) -> None:
        """The other answer to `borrow`: nobody lends."""
        self.post(lambda: self._refused(key))

    def sampled(self, key: int, token: pb.SampledToken) -> None:
        """The stage that ends the model has sampled the token that follows a prompt: all of it is
        computed."""
        self.post(lambda: self._sampled(key, token))

    def scored(self, key: int, logprobs: pb.PromptLogprobs) -> None:
        """That stage's logprobs of a prompt's own tokens, before what it samples."""
        self.post(lambda: self._scored(key, logprobs))

    def survey(self, holder: Creditor | None = None) -> Future[list[Movable]]:
        """What could move, of one holder's or of all, oldest sequence first."""
        answer: Future[list[Movable]] = Future()
        self.post(lambda: reply(answer, self._survey(holder)))
        return answer

    def switch(self, move: Movable, moved: Run, ref: SegmentRef) -> Future[float | None]:
        """From its next iteration on, the leading blocks of the run lie in `moved`, which has copies of them,
        and its other blocks are reached by `ref`. The seconds that the iteration waited for it, once none
        uses the blocks before; None where the sequence has ended: `moved` is still the caller's then."""
        answer: Future[float | None] = Future()
        self.post(lambda: self._switch(move, moved, ref, answer))
        return answer

    def post(self, command: Callable[[], None]) -> None:
        """To be done on the engine's thread, between two iterations or two layers of one."""
        self._mailbox.post(command)

    @contextmanager
    def reserving(self) -> Iterator[None]:
        """Meanwhile blocks may be held for a sequence that is not handed in yet, and come free if others do
        not lend the rest. Always on the same thread."""
        if self._reservations == self._reserved:
            self._reserving_s = time.monotonic()
        self._reservations += 1
        try:
            yield
        finally:
            self.post(self._reservation_ended)  # behind the sequence, if it is handed in

    # Below: the engine's thread.

    def fail_all(self, error: KVCommonsError) -> None:
        """Ends all sequences."""
        for key in list(self._sequences):
            self._fail(key, error)

    # What executors use (`Work`).

    def make_room(self) -> Mapping[int, Generating]:
        """Those that have room for a token, once room was made where it can be."""
        plan = plan_for(
            self._scheduler,
            self._sequences,
            free_blocks=self._core.allocator.free,
            may_borrow=self._may_borrow,
            may_preempt=self._may_preempt,
        )
        self._carry_out(plan)
        return {
            key: self._sequences[key]
            for key in plan.batch
            if key in self._sequences and not self._sequences[key].full
        }

    def drafts(self, sequences: Sequence[Generating]) -> Mapping[int, Sequence[int]]:
        if self._speculation is None or not sequences:
            self._drafting_s = 0.0
            return {}
        began_s, cores = time.monotonic(), partial(self._cores.computing, urgent=True)
        drafts = self._speculation.drafts(sequences, self._grow_ahead, cores)
        self._drafting_s = time.monotonic() - began_s
        return drafts

    def spans(self, *, beside: IterationWork, objectives_s: Collection[float] = ()) -> Sequence[PromptSpan]:
        if not self._prompts:
            return ()
        return self._prompts.spans(
            self._fail, beside=beside, objectives_s=objectives_s, spent_s=self._drafting_s
        )

    def prompts(self) -> bool:
        return bool(self._prompts)

    def load(self) -> tuple[int, int]:
        lengths = [len(one.tokens) for one in self._sequences.values() if one.prompt_computed]
        return len(lengths), sum(lengths)

    def answer_switches(self) -> None:
        for answer, began_s in self._switches:
            reply(answer, time.monotonic() - began_s)
        self._switches.clear()

    def cores(self, iteration: Iteration) -> AbstractContextManager[None]:
        return self._cores.iterating(iteration)

    def between_layers(self, iteration: Iteration) -> None:
        """Attention for others that waits is computed while a chunk pauses, whose layers take long; commands
        are carried out, but for those about sequences that generate in this iteration. Chunks by themselves
        let other engines have the cores, and sequences that have begun meanwhile generate: they wait for a
        layer, or for some of a short chunk, instead of all of it."""
        kinds = {type(group) for group in iteration.groups}
        self._budget.between_layers(gives_way=PromptSpan in kinds)
        if TokenRows not in kinds:
            self._cores.give_way()
        if self._mailbox.posted:
            self._serve_between_layers()
        if TokenRows not in kinds and self._scheduler.any_running:
            self._executor.generate(self)
            self._flush()

    def _serve_between_layers(self) -> None:
        commands = self._mailbox.take(0)
        if commands is None:
            for key in [key for key in self._sequences if self._prompt(key) is not None]:
                self._fail(key, Unavailable("this instance is stopping"))
            return
        self._serve(commands)
        self.answer_switches()  # those that were switched are in no iteration
        self._flush()

    def took(self, iteration: Iteration) -> None:
        spans = [group for group in iteration.groups if isinstance(group, PromptSpan)]
        computed_s = iteration.timing.own_s - sum(span.waited_s for span in spans)
        self._budget.iterated(computed_s + self._drafting_s)
        reads = any(span.wanted_logprobs() is not None for span in spans)  # logits of each of its rows
        if not iteration.failures and not reads:
            self.predictor.learn(iteration.work, computed_s - iteration.timing.waiting_s)
            if self._speculation is not None and not spans:
                self._speculation.took(iteration.work, computed_s - iteration.timing.waiting_s)

    def take_results(
        self,
        iteration: Iteration,
        tokens: Sequence[Sequence[pb.SampledToken]] | None,
        groups: Collection[int] | None = None,
    ) -> None:
        if groups is None and tokens is not None:
            self.took(iteration)
        sampled = tokens or [()] * len(iteration.groups)
        seconds = iteration.timing.own_s
        for number, group in enumerate(iteration.groups):
            if groups is not None and number not in groups:
                continue
            failure = iteration.failures.get(number)
            if isinstance(group, TokenRows):
                if tokens is None or failure is not None:
                    self._failed(group, failure)
                else:
                    self._generated(group, sampled[number])
                    self._metrics.iteration(len(group.batch.last_rows()), iteration.timing)
            elif isinstance(group, PromptSpan):
                if tokens is None:
                    failure = Internal("an iteration failed; the log of its instance says why")
                for logprobs in iteration.prompt_logprobs.get(number, ()):
                    self._scored(group.prompt.key, logprobs)
                self._advanced(group, failure, sampled[number], seconds)

    def idle(self) -> None:
        self._budget.idle()

    def _run(self) -> None:
        with torch.inference_mode():
            wait_s: float | None = None
            while (commands := self._mailbox.take(wait_s)) is not None:
                self._serve(commands)
                try:
                    wait_s = self._advance()
                except Exception:
                    self._fail_unexpectedly()
                    wait_s = None  # until something is posted: what fails for ever does not take a core
                self._flush()
        self._executor.close()
        for command in self._mailbox.rest():  # somebody may wait for what it answers
            try:
                command()
            except Exception:
                log.exception("the engine's loop failed")
        self.fail_all(Unavailable("this instance is stopping"))
        self._flush()
        for answer, _ in self._switches:
            reply(answer, 0.0)

    def _serve(self, commands: deque[Command]) -> None:
        try:
            while commands:
                commands.popleft()()
        except Exception:
            self._fail_unexpectedly()
            self._mailbox.put_back(commands)  # somebody may wait for those behind the one that failed

    def _fail_unexpectedly(self) -> None:
        log.exception("the engine's loop failed")
        self.fail_all(Internal("the engine failed unexpectedly; its log says why"))

    def _advance(self) -> float | None:
        """Computes what there is to compute. How long to wait for commands then; None: until one comes."""
        if self._prompts:
            for key in self._prompts.expired():
                self._fail(key, DeadlineExceeded("the prompt was not computed within its deadline"))
            self._prompts.admit()
        if self._executor.advance(self) or (self._prompts and self._prompts.await_history()):
            return 0
        if self._scheduler.any_running:
            return SHORT_S
        return POLL_S if self._prompts else None

    def _submit(self, prompt: Prompt) -> None:
        try:
            if self._prompts is None:
                raise Unavailable("no prompts are computed on this instance")
            self._executor.check()
            self._prompts.submit(prompt)
        except KVCommonsError as error:
            prompt.sink.refused(error)
            return
        self._sequences[prompt.key] = prompt.sequence

    def _add(self, sequence: Generating) -> None:
        self._sequences[sequence.key] = sequence
        self._scheduler.reserve(sequence.key)

    def _begin(self, key: int, first: pb.SampledToken) -> None:
        sequence = self._sequences.get(key)
        if sequence is None:
            return
        reason = sequence.start(first.token)
        self._tell(sequence, first)
        self._publisher.publish_full(sequence, prompt=True)
        if reason:
            self._end(key, reason=reason)
        else:
            self._scheduler.start(key)

    def _cancel(self, key: int) -> None:
        if key in self._sequences and not self._executor.defer(key, lambda: self._cancel(key)):
            prompt = self._prompt(key)
            if prompt is not None:
                prompt.sink.cancelled()
            self._end(key)
            self._steps.pop(key, None)

    def _fail(self, key: int, error: KVCommonsError) -> None:
        if key in self._sequences and not self._executor.defer(key, lambda: self._fail(key, error)):
            prompt = self._prompt(key)
            self._end(key, error=error)
            if prompt is not None:
                prompt.sink.failed(error)

    def _grown(self, key: int, run: Run) -> None:
        sequence = self._sequences.get(key)
        if sequence is None:
            if isinstance(run, RemoteRun):
                self._callbacks.give_back([run])
            else:
                self._core.allocator.release(run.blocks)
            return
        sequence.append_run(run)
        sequence.refused = False
        self._executor.changed()
        self._scheduler.borrowed(key)

    def _refused(self, key: int) -> None:
        if key not in self._sequences:
            return
        self._sequences[key].refused = True
        if not self._core.allocator.free:  # else there is room here
            may_preempt = self._may_preempt
            victim = self._scheduler.victim_for(key, freed_by(self._sequences), may_preempt=may_preempt)
            if victim is not None:
                self._preempt(victim)
        self._scheduler.borrowed(key)

    def _survey(self, holder: Creditor | None) -> list[Movable]:
        return [
            Movable.of(sequence, run)
            for _, sequence in sorted(self._sequences.items())
            for run in sequence.remote_runs()
            if (holder is None or run.holder is holder) and sequence.movable(run)
        ]

    def _switch(self, move: Movable, moved: Run, ref: SegmentRef, answer: Future[float | None]) -> None:
        if self._executor.defer(move.key, lambda: self._switch(move, moved, ref, answer)):
            return
        began_s = time.monotonic()
        sequence = self._sequences.get(move.key)
        if sequence is None or not sequence.move(move.run, moved, ref):
            reply(answer, None)
            return
        if isinstance(moved, LocalRun):
            self._publisher.publish_moved(sequence, moved)
        self._executor.changed()
        self._switches.append((answer, began_s))

    def _carry_out(self, plan: Plan) -> None:
        for key in plan.preempt:
            self._preempt(key)
        for key in plan.borrow:
            sequence = self._sequences[key]
            sequence.on_behalf(self._callbacks.borrow, sequence)
        for key in plan.grow:
            self._grow(self._sequences[key])

    def _grow(self, sequence: Generating) -> None:
        try:
            blocks = self._core.allocator.allocate(1)
        except CapacityExhausted:  # a new sequence was quicker: the next iteration decides anew
            return
        sequence.append_run(LocalRun(first_block=sequence.blocks, blocks=blocks))
        sequence.refused = False
        self._executor.changed()

    def _grow_ahead(self, sequence: Generating) -> None:
        """A block that it is about to want, where that leaves each other one a block of its own."""
        ends = sequence.blocks * self._core.block_tokens >= sequence.request.max_position
        here = sequence.next_block() in (Next.HERE, Next.HERE_FIRST)
        if here and not ends and self._core.allocator.free > len(self._sequences):
            self._grow(sequence)

    @property
    def _may_preempt(self) -> bool:
        """Not while blocks of the last one that gave way may still be coming free, or those of a reservation:
        an older sequence would go for nothing."""
        now_s = time.monotonic()
        if self._reservations > self._reserved and now_s - self._reserving_s <= RESERVING_S:
            return False
        return now_s - self._preempted_s > PREEMPT_PAUSE_S

    def _reservation_ended(self) -> None:
        self._reserved += 1

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

    def _generated(self, group: TokenRows, tokens: Sequence[pb.SampledToken]) -> None:
        accepted = 0
        if self._speculation is not None:
            self._speculation.mark(group.batch, tokens)
        for row, (sequence, token) in enumerate(zip(group.batch.sequences, tokens, strict=True)):
            if group.batch.drafted(row):
                if not group.batch.follows(row) or token.HasField("error"):
                    continue  # it is sampled again, as the sequence's next token, if it has one
                accepted += 1
            if row in group.lost:
                self._fail(sequence.key, group.lost[row])
                continue
            if token.HasField("error"):
                self._fail(sequence.key, from_detail(token.error))
                continue
            self._tell(sequence, token)
            reason = sequence.append(token.token)
            self._publisher.publish_full(sequence)
            if reason:
                self._end(sequence.key, reason=reason)
        if group.batch.drafts:
            self._metrics.verified(len(tokens) - len(group.batch.last_rows()), accepted)

    def _failed(self, group: TokenRows, failure: Exception | None) -> None:
        if failure is not None:
            log.error("an iteration failed", extra={"batch": len(group.batch.sequences)}, exc_info=failure)
        for sequence in group.batch.sequences:
            self._fail(sequence.key, Internal("decode failed in an iteration; its log says why"))

    def _advanced(
        self, span: PromptSpan, failure: Exception | None, tokens: Sequence[pb.SampledToken], seconds: float
    ) -> None:
        prompt, prompts = span.prompt, self._prompts
        assert prompts is not None
        if prompt.key not in prompts:
            return
        try:
            prompts.take_result(span, failure, seconds)
        except KVCommonsError as error:
            self._fail(prompt.key, error)
            return
        if tokens:
            self._sampled(prompt.key, tokens[0])

    def _scored(self, key: int, logprobs: pb.PromptLogprobs) -> None:
        prompt = self._prompt(key)
        if prompt is not None:
            prompt.sink.scored(prompt, logprobs)

    def _sampled(self, key: int, token: pb.SampledToken) -> None:
        prompt = self._prompt(key)
        if prompt is None:
            return  # it has ended meanwhile
        if token.HasField("error"):
            self._fail(key, from_detail(token.error))
            return
        first = prompt.result(token)
        if prompt.sink.goes_on:
            assert self._prompts is not None
            self._prompts.remove(key)
            self._begin(key, token)
        else:
            self._end(key)
        prompt.sink.finished(prompt, first)

    def _end(self, key: int, *, reason: str = "", error: KVCommonsError | None = None) -> None:
        """The sequence holds nothing any more; what it published stays in the device tier."""
        sequence = self._sequences.pop(key)
        generates = self._prompt(key) is None
        if self._prompts is not None and not generates:
            self._prompts.remove(key)
        self._scheduler.remove(key)
        self._executor.leave(key)
        if self._speculation is not None:
            self._speculation.leave(key)
        sequence.ended = True
        self._core.allocator.release(sequence.local_blocks())
        remote = sequence.remote_runs()
        if remote:
            sequence.on_behalf(self._callbacks.give_back, remote)
        if not generates:
            return
        step = self._step(key)
        step.reason, step.error, step.saved_blocks = reason, error, sequence.saved_blocks
        if reason or error is not None:
            self._metrics.ended(step)

    def _prompt(self, key: int) -> Prompt | None:
        """Of a sequence whose prompt is computed here."""
        return self._prompts.get(key) if self._prompts is not None else None

    def _tell(self, sequence: Generating, token: pb.SampledToken) -> None:
        step = self._step(sequence.key)
        step.tokens.append(token)
        borrowed = sequence.news_of_borrowed()
        step.borrowed = step.borrowed if borrowed is None else borrowed

    def _step(self, key: int) -> SequenceUpdate:
        return self._steps.setdefault(key, SequenceUpdate(key=key))

    def _flush(self) -> None:
        if self._steps:
            steps, self._steps = self._steps, {}
            self._callbacks.deliver(list(steps.values()))
