"""Prompts that an engine computes: they are admitted to memory, their history is loaded, their chunks become
spans of iterations, and what comes of them goes where their sinks say."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import Tensor

from kvcommons.backend.interface import PagedRows
from kvcommons.engine.chunk_budget import ChunkBudget
from kvcommons.engine.chunk_rows import ChunkRows
from kvcommons.engine.core import Core
from kvcommons.engine.core_lock import CoreLock
from kvcommons.engine.history import Histories
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.keeper import BlockKeeper, KeptRun
from kvcommons.engine.load_or_compute import LoadOrCompute
from kvcommons.engine.predictor import Predictor
from kvcommons.engine.preloading import LoadFellShort, Preloading
from kvcommons.engine.prompt import Prompt
from kvcommons.engine.read_buffer import ReadBuffer
from kvcommons.engine.scheduler import Scheduler
from kvcommons.errors import CapacityExhausted, Internal, KVCommonsError
from kvcommons.grammar.grammars import prepare_masks
from kvcommons.model.prompt_logprobs import WantedLogprobs
from kvcommons.model.sampling import SamplingRow
from kvcommons.model.slices import State
from kvcommons.telemetry.trace import Tracer

log = logging.getLogger(__name__)

LOAD_POLL_S = 0.002  # while prompts wait for history; commands are seen as often

Fail = Callable[[int, KVCommonsError], None]


class Prompts:
    """Belongs to the engine's thread."""

    def __init__(
        self,
        core: Core,
        scheduler: Scheduler,
        *,
        chunk_tokens: int,
        keeper: BlockKeeper,
        histories: Histories,
        read_buffer: ReadBuffer,
        predictor: Predictor | None = None,
        cost: LoadOrCompute | None = None,
        stages: int = 1,
        tracer: Tracer,
        tbt_objective_s: float = math.inf,
        lends: Callable[[], bool] = lambda: False,
        core_lock: CoreLock | None = None,
    ) -> None:
        """`chunk_tokens`: of one iteration, at most. `histories` loads what the store has of prompts, as far
        ahead as `read_buffer` allows, where `cost` finds that faster than to compute it, in so many `stages`.
        `tbt_objective_s`: between two tokens of the sequences that generate beside prompts. `lends`: whether
        others' attention waits for this process, too. `core_lock`: where other engines of the host share
        its cores."""
        self._core = core
        self._scheduler = scheduler
        self._chunk_tokens = chunk_tokens
        self._keeper = keeper
        self.predictor = predictor or Predictor()
        compute_s = partial(self.predictor.prompt_seconds, chunk_tokens=chunk_tokens, stages=stages)
        cost = cost or LoadOrCompute(compute_s)
        self.preloading = Preloading(core, histories, cost, read_buffer)
        self._tracer = tracer
        self._prompts: dict[int, Prompt] = {}
        self._tbt_objective_s = tbt_objective_s
        self._lends = lends
        self._core_lock = core_lock
        self._unready: set[int] = set()  # whose history was not there at the last look
        self._again = False  # something may be computed at once though the last look found nothing
        self.claims: dict[bytes, int] = {}  # blocks that a prompt is about to publish

    def __contains__(self, key: int) -> bool:
        return key in self._prompts

    def __bool__(self) -> bool:
        return bool(self._prompts)

    @property
    def layers(self) -> range:
        return self._core.layers

    @property
    def in_ranks(self) -> bool:
        return self._core.model.rank.ranks > 1

    def get(self, key: int) -> Prompt | None:
        return self._prompts.get(key)

    def submit(self, prompt: Prompt) -> None:
        """Queues a prompt; whatever becomes of it, its sink hears. Raises CapacityExhausted, Overloaded."""
        prompt.memory.check(prompt)
        self._scheduler.submit(
            prompt.key,
            tokens=prompt.tokens,
            deadline_s=prompt.deadline_s,
            background=prompt.request.background,
        )
        self._prompts[prompt.key] = prompt

    def remove(self, key: int) -> None:
        """It is not computed any more: nothing is written to its blocks when this returns."""
        prompt = self._prompts.pop(key)
        self._unready.discard(key)
        if prompt.load is not None:
            prompt.load.cancel()
        for identity in prompt.ids:
            if self.claims.get(identity) == key:
                del self.claims[identity]
        prompt.memory.close(prompt)

    def expired(self) -> list[int]:
        """Those whose deadline has passed."""
        return self._scheduler.expired(time.monotonic())

    def admit(self) -> None:
        """Gives memory to those that are next, as far as there is any."""
        progress = True
        while progress:
            progress = False
            for key in self._scheduler.admissible():
                prompt = self._prompts[key]
                try:
                    reserved = prompt.memory.take(prompt)
                except CapacityExhausted:
                    if self._keeper.make_room():
                        progress = True  # what waited to be saved is in the way of no prompt
                    break  # the first in line has the next claim on memory
                if reserved:
                    prompt.sequence.on_behalf(self._begin, prompt)
                    progress = True
                    break

    def spans(
        self,
        fail: Fail,
        *,
        beside: IterationWork,
        objectives_s: Collection[float] = (0.0,),
        spent_s: float = 0.0,
    ) -> list[PromptSpan]:
        """Of the next iteration, `beside` what sequences that generate have in it, which are promised a token
        within `objectives_s` (0: as the settings have it), of which so much is spent already. An `exclusive`
        prompt is the only one."""
        generates, budget = beside.rows > 0, self._budget(beside, objectives_s, spent_s)

        def ready(key: int) -> bool:
            found = self.preloading.ready(self._prompts[key], whole=generates)
            (self._unready.discard if found else self._unready.add)(key)
            return found

        def is_short(key: int) -> bool:
            prompt = self._prompts[key]
            return budget.is_short(prompt.sequence.computed, prompt.tokens_left, prompt.memory.work)

        wanted = self._scheduler.spans(ready, self._chunk_tokens, is_short)
        spans: list[PromptSpan] = []
        for key, tokens in wanted:
            prompt = self._prompts[key]
            exclusive = self.exclusive(prompt)
            fitting = budget.fit(prompt.sequence.computed, tokens, prompt.memory.work)
            if not fitting or (spans and exclusive):
                continue
            try:
                span = self._span(prompt, fitting)
            except KVCommonsError as error:
                fail(key, error)
                span = None
            if span is None:
                self._again = True
                continue
            spans.append(span)
            budget.add(span.work)
            if exclusive:
                break
        return spans

    def exclusive(self, prompt: Prompt) -> bool:
        """Whether its history is still on its way, or lies with several holders: then it is alone in its
        iteration, so that its waits stall nobody else; or other ranks wait while its logprobs are read."""
        reads = self.in_ranks and prompt.request.prompt_logprobs is not None
        return reads or not self.preloading.whole(prompt) or not prompt.memory.keeps

    def await_history(self) -> bool:
        """There was nothing to compute: waits a moment for the oldest prompt's history. False where none
        waits for any."""
        again, self._again = self._again, False
        if again:
            return True
        for key, prompt in self._prompts.items():
            if prompt.load is None:
                continue
            if not self.preloading.whole(prompt):
                self.preloading.wait_a_moment(prompt, LOAD_POLL_S)
                return True
            if key in self._unready:  # since the last look
                self._unready.discard(key)
                return True
        return False

    def take_result(self, span: PromptSpan, failure: Exception | None, seconds: float) -> None:
        """A span's iteration has ended, of which it took so long. Raises what ends its prompt."""
        prompt = span.prompt
        if isinstance(failure, LoadFellShort):
            prompt.memory.close(prompt)
            self.preloading.set_back(prompt, failure)
        elif isinstance(failure, KVCommonsError):
            raise failure
        elif failure is not None:
            log.error("a chunk failed", extra={"attempt": prompt.request.request_id}, exc_info=failure)
            raise Internal("the prompt could not be computed; the log of its instance says why")
        else:
            if prompt.load is not None:
                self.preloading.ended(prompt)
            span.save_whole()
            prompt.sequence.computed = span.chunk.stop
            prompt.compute_s += max(seconds - span.waited_s, 0.0)
            if prompt.memory.keeps:
                self._publish(prompt, span.final)
            prompt.memory.close(prompt)
        self._scheduler.progress(prompt.key, tokens_left=prompt.tokens_left)

    def save(self, prompt: Prompt, layer: int, blocks: range) -> None:
        """One layer of these full blocks goes to the store, as far as it is not known to have them. Nothing
        of a prompt without reuse: it leaves nothing behind that a later one could profit from."""
        request = prompt.request
        first = max(blocks.start, prompt.save_from)
        if request.no_reuse or not request.store_data or first >= blocks.stop:
            return
        run = KeptRun(
            store=request.store_data,
            tenant=request.tenant,
            parent=prompt.ids[first - 1] if first else b"",
            first_index=first,
            ids=tuple(prompt.ids[first : blocks.stop]),
            blocks=tuple(prompt.blocks[first : blocks.stop]),
        )
        self._keeper.save(run, layer)

    def save_found(self, prompt: Prompt) -> None:
        """What was found here goes to the store, as far as it is not known to have it."""
        for layer in self._core.layers:
            self.save(prompt, layer, range(min(prompt.device_blocks, len(prompt.ids))))

    def span(self, prompt: Prompt, chunk: range) -> PromptSpan:
        """These positions of it, in an iteration."""
        return PromptSpan(self, prompt, chunk, self._tracer.span("prefill chunk"))

    def await_layer(self, prompt: Prompt, layer: int) -> None:
        """Until this layer of its history is there. Raises LoadFellShort."""
        load = prompt.load
        if load is None or not prompt.loaded_blocks:
            return
        lock = self._core_lock
        idle = nullcontext() if lock is None or load.arrived(layer) else lock.released()
        with idle:
            self.preloading.await_layer(prompt, layer)

    def _budget(self, beside: IterationWork, objectives_s: Collection[float], spent_s: float) -> ChunkBudget:
        """Of the next iteration: the strictest of the objectives counts. Half of it is left to others where
        they wait, for nobody knows when they ask."""
        promised_s = [one or self._tbt_objective_s for one in objectives_s] if beside.rows else []
        if self._lends():
            objective_s = min([self._tbt_objective_s, *promised_s]) / 2
        else:
            objective_s = min(promised_s, default=math.inf)
        left_s = max(objective_s - spent_s, 0.0)
        return ChunkBudget(self.predictor, beside, objective_s=left_s, chunk_tokens=self._chunk_tokens)

    def _begin(self, prompt: Prompt) -> None:
        prompt.save_from = prompt.request.matched_blocks
        if not prompt.memory.keeps:  # what did not reach its holders is not there
            prompt.save_from = min(prompt.save_from, prompt.placed_blocks)
        elif not prompt.request.no_reuse:
            for identity in prompt.ids[prompt.device_blocks :]:
                self.claims.setdefault(identity, prompt.key)
        if prompt.loaded_blocks:
            self.preloading.begin(prompt, self._prompts.values())
            if not self._scheduler.computing:
                self.preloading.release(prompt)
        prompt.admitted_s = time.monotonic()
        self._scheduler.admit(prompt.key, tokens_left=prompt.tokens_left)
        self.save_found(prompt)
        prompt.sink.began(prompt, int((prompt.admitted_s - prompt.submitted_s) * 1e6))

    def _span(self, prompt: Prompt, tokens: int) -> PromptSpan | None:
        """None where its memory is not ready for it. Raises what ends the prompt."""
        failure = prompt.sink.failure
        if failure is not None:
            raise failure
        self.preloading.release(prompt)
        if prompt.load is not None and self.preloading.read_buffer.whole_first:
            try:  # others begin with the chunk, and do not ask for its history
                self.await_layer(prompt, self._core.layers[-1])
            except LoadFellShort as short:
                self.preloading.set_back(prompt, short)
                self._scheduler.progress(prompt.key, tokens_left=prompt.tokens_left)
                return None
        prompt.check_history()
        chunk = prompt.memory.chunk(prompt, tokens)
        if not prompt.memory.open(prompt, chunk):
            return None
        return self.span(prompt, chunk)

    def _publish(self, prompt: Prompt, blocks: range) -> None:
        """These full blocks join the device tier."""
        if prompt.request.no_reuse:
            return
        for index in blocks:
            self._core.allocator.publish(prompt.blocks[index], prompt.ids[index])
            if self.claims.get(prompt.ids[index]) == prompt.key:
                del self.claims[prompt.ids[index]]


class PromptSpan:
    """A chunk of a prompt in an iteration. Use once."""

    def __init__(
        self, prompts: Prompts, prompt: Prompt, chunk: range, traced: AbstractContextManager[object]
    ) -> None:
        """`chunk`: its positions."""
        self.prompt = prompt
        self.chunk = chunk
        self._prompts = prompts
        self._rows: ChunkRows = prompt.memory.rows(prompt, chunk)
        completed = prompt.completed_blocks(chunk)
        full = min(completed.stop, len(prompt.ids))
        self._full = range(completed.start, full)
        # What was found goes out with the first chunk: a layer is one message a holder.
        first = completed.start if chunk.start > prompt.reused_tokens else 0
        self._pushed = range(first, completed.stop)
        self.final = range(first, full)  # full ones, with its end
        # Behind a history that is on its way, or where another rank may have failed.
        self._unsaved = prompt.load is not None or prompts.in_ranks
        self._waited_s = prompt.load_wait_s
        self._context = prompt.request.origin.copy()
        self._traced = traced
        self._timing: IterationTiming

    @property
    def tokens(self) -> Tensor:
        return self._rows.tokens

    @property
    def positions(self) -> Tensor:
        return self._rows.positions

    @property
    def work(self) -> IterationWork:
        return self.prompt.memory.work(self.chunk)

    @property
    def exclusive(self) -> bool:
        """Whether nothing else may be in its iteration."""
        return self._prompts.exclusive(self.prompt)

    @property
    def waited_s(self) -> float:
        """For history."""
        return self.prompt.load_wait_s - self._waited_s

    def open(self, timing: IterationTiming) -> None:
        self._timing = timing
        sequence = self.prompt.sequence
        if self.chunk.stop == self.prompt.tokens and sequence.constraint is not None:
            prepare_masks([(sequence.constraint, sequence.tokens, ())])
        self._context.run(self._traced.__enter__)

    def close(self) -> None:
        self._context.run(self._traced.__exit__, None, None, None)

    def paged(self) -> PagedRows | None:
        """None, too, behind a history that comes with this chunk: each layer is waited for."""
        return self._rows.paged() if self.prompt.load is None else None

    def passed(self, layers: range) -> None:
        """What is final of them goes out."""
        for layer in layers:
            self._context.run(self._hand_over, layer)

    def sampling(self) -> list[SamplingRow]:
        prompt = self.prompt
        if self.chunk.stop < prompt.tokens:
            return []
        return [prompt.sequence.sampling_row()]

    def wanted_logprobs(self) -> WantedLogprobs | None:
        top, first = self.prompt.request.prompt_logprobs, self.chunk.start + 1
        tokens = self.prompt.request.tokens[first : self.chunk.stop + 1]
        return None if top is None or not tokens else WantedLogprobs(first=first, tokens=tokens, top=top)

    def attend(self, layer: int, state: State, *, needed: bool) -> Tensor | None:
        """What is final goes out before the layer is attended over."""
        self._prompts.await_layer(self.prompt, layer)
        began_s = time.monotonic()
        self._rows.write(layer, state)
        self._context.run(self._hand_over, layer)
        attention = self._rows.attend(layer, state) if needed else None
        self._timing.here_s += time.monotonic() - began_s
        return attention

    def save_whole(self) -> None:
        """What was not saved layer by layer is, now that it is known to be right."""
        unsaved, self._unsaved = self._unsaved, False
        if unsaved:
            for layer in self._prompts.layers:
                self._context.run(self._prompts.save, self.prompt, layer, self._full)

    def drop(self) -> None:
        """Nothing of it is right: what was not saved is not."""
        self._unsaved = False

    def _hand_over(self, layer: int) -> None:
        self.prompt.sink.computed(self.prompt, layer, self._pushed)
        if not self._unsaved:
            self._prompts.save(self.prompt, layer, self._full)
