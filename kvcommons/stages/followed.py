"""An epoch of the stages, from a process beside the first: a thread that carries out what is planned, and
reports of what it has done."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvcommons.engine.core import Core
from kvcommons.engine.executor import Composer
from kvcommons.engine.history import Condemner, Histories, Load
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.engine.prompt import Prompt, PromptMemory, PromptSink, StaysHere
from kvcommons.engine.prompt_memory import WholePrompt
from kvcommons.engine.prompts import Prompts, PromptSpan
from kvcommons.engine.request import Request
from kvcommons.engine.sequence import Sequence
from kvcommons.engine.token_rows import TokenRows
from kvcommons.errors import InvalidInput, KVCommonsError, StaleEpoch, Unavailable
from kvcommons.pb import common_pb2
from kvcommons.pb import data_pb2 as pb
from kvcommons.prefill.handover import HandOver
from kvcommons.prefill.push import Delivery, Pusher
from kvcommons.prefill.spread import Holders, SpreadPrompt
from kvcommons.prefill.targets import TargetTable
from kvcommons.rblock.layout import Layout
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.stages.attending import AttendedHolders
from kvcommons.stages.batches import SteppedBatches
from kvcommons.stages.held import Held, HeldPrompt, HeldSequence, HeldSpread
from kvcommons.stages.iteration import StageIteration
from kvcommons.stages.link import StageLink
from kvcommons.stages.ranks import RankGroup
from kvcommons.transport.deadline import Deadline

log = logging.getLogger(__name__)

REPORT_LOGPROBS_MAX = 8  # messages of a report; each is of bounded size
Made = list[tuple[int, common_pb2.SampledToken]]  # tokens by sequence
LOOK_S = 0.005  # between looks at what ends by itself: loads, and what is on its way out
GONE_MAX = 4096  # sequences that have ended are known, so that nobody waits for them


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochParts:
    """What a process beside the first one has, whatever epoch it is in. `whole`, `prompts` and `composer` are
    used by one epoch at a time; `ranks`: its own among several."""

    core: Core
    number: int  # of the stage
    keeper: BlockKeeper
    pusher: Pusher
    histories: Histories
    condemner: Condemner
    prompts: Prompts
    whole: WholePrompt
    composer: Composer
    attend_deadline_s: float  # that a layer of a chunk waits for holders of its prompt
    ranks: RankGroup | None = None
    dialer: Dialer = UNSECURED


class FollowedEpoch:
    """One life of the group, at this stage: a thread that carries out plans in their order."""

    def __init__(self, parts: EpochParts, join: pb.JoinStages) -> None:
        self.number = join.epoch
        self._parts = parts
        self._core = parts.core
        self._link = StageLink(join.next_address, join.epoch, parts.dialer) if join.next_address else None
        beside = [] if join.rank else join.above
        self._beside = [StageLink(address, join.epoch, parts.dialer) for address in beside]
        self._above = list(join.above)
        self._plans: queue.SimpleQueue[tuple[pb.StagePlan, Tensor | None] | None] = queue.SimpleQueue()
        self._received = 0
        self._batches = SteppedBatches(self._core)
        self._holders = AttendedHolders(Layout.of(self._core.info), self._core.heads, parts.dialer)
        self._spread_over = Holders(
            self._core.layout,
            self._core.backend,
            attend_deadline_s=parts.attend_deadline_s,
            heads=self._core.heads,
            dialer=parts.dialer,
        )
        self._held: dict[int, Held] = {}
        self._gone = deque[int](maxlen=GONE_MAX)  # sequences, after they were held
        self._loads: dict[int, Load] = {}
        # Guards what follows, and the three above where others look at them.
        self._changed = threading.Condition()
        self._report = pb.StageReport()
        self._failure: KVCommonsError | None = None
        self._thread = threading.Thread(target=self._run, name="stage", daemon=True)

    @property
    def held(self) -> int:
        """Sequences that have begun, and are not reported as ended."""
        return len(self._held)

    @property
    def computes(self) -> bool:
        """Whether its thread may still write to blocks."""
        return self._thread.is_alive()

    @property
    def _links(self) -> list[StageLink]:
        return [*self._beside, *([] if self._link is None else [self._link])]

    def start(self) -> None:
        self._thread.start()

    @contextmanager
    def writable(self, write: pb.WriteBlocks, deadline: Deadline) -> Iterator[list[int]]:
        """Physical blocks of a sequence that is to generate here, which stay its own meanwhile; the plan that
        says so may still be on its way. Raises StaleEpoch, InvalidInput."""
        allocator, key = self._core.allocator, write.handle

        def known() -> bool:
            return bool(self._failure) or key in self._held or key in self._gone

        with self._changed:
            self._changed.wait_for(known, deadline.left())
            held = self._held.get(key)
            if self._failure is not None or not isinstance(held, HeldSequence):
                raise StaleEpoch(f"no sequence {key} waits for its prompt in this epoch")
            blocks = held.writable(write.first_block, write.blocks)
            allocator.retain(blocks)
        try:
            yield blocks
        finally:
            allocator.release(blocks)

    def put(self, plan: pb.StagePlan, hidden: Tensor | None) -> None:
        """Raises InvalidInput where a plan before it was lost."""
        self._received += 1
        if plan.number != self._received:
            raise InvalidInput(f"plan {plan.number} came where {self._received} was due")
        self._plans.put((plan, hidden))

    def end(self, failure: KVCommonsError) -> None:
        """Nothing more is computed or sent once the chunk under way is done. Any thread, any number of
        times."""
        with self._changed:
            first, self._failure = self._failure is None, self._failure or failure
            self._changed.notify_all()
        if first:
            log.info("the stages' epoch has ended: %s", failure.message, extra={"epoch": f"{self.number:x}"})
        self._plans.put(None)
        for link in self._links:
            link.close()
        if self._parts.ranks is not None:
            self._parts.ranks.leave(self.number)

    def report(self) -> pb.StageReport:
        """What has happened since the last one. Raises why the epoch has ended."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            report, self._report = self._report, pb.StageReport()
            self._changed.notify_all()
        return report

    def await_report(self, within_s: float) -> None:
        """Until there is something to report, or that long."""
        until = Deadline.after(within_s)
        with self._changed:
            while not (self._failure or self._look() or until.passed()):
                watching = self._loads or any(held.ends for held in self._held.values())
                self._changed.wait(min(until.left(), LOOK_S if watching else within_s))

    def _look(self) -> bool:
        """Whether there is something to report; what has ended by itself is."""
        report, last = self._report, self._core.layers[-1]
        for number, load in list(self._loads.items()):
            if load.ended or load.arrived(last):
                del self._loads[number]
                report.loads.add(load=number, blocks=load.wait(last, Deadline.after(0)))
        for key, held in list(self._held.items()):
            for first in held.left(self._core.allocator):
                report.windows.add(sequence=key, first=first)
            if held.ended and self._core.allocator.held_once(held.blocks):
                del self._held[key]
                self._holders.forget(held.remote_runs)
                self._gone.append(key)
                report.ended.append(key)
        return bool(report.ByteSize())

    def _tell(self, add: Callable[[pb.StageReport], None]) -> None:
        with self._changed:
            add(self._report)
            self._changed.notify_all()

    # Below: the epoch's thread.

    def _run(self) -> None:
        ranks = self._parts.ranks
        try:
            if ranks is not None:
                ranks.join(self.number, self._above)
            with torch.inference_mode():
                while (item := self._plans.get()) is not None and self._failure is None:
                    self._carry_out(*item)
        except KVCommonsError as error:
            self._fail(error)
        except Exception as error:
            log.exception("a stage failed")
            self._fail(Unavailable(f"stage {self._parts.number} failed: {type(error).__name__}; see its log"))
        finally:
            if ranks is not None:
                ranks.leave(self.number)
            with self._changed:
                loads, self._loads = list(self._loads.values()), {}
                held = list(self._held.values())
            self._holders.close()
            self._spread_over.close()
            for load in loads:
                load.cancel()
            for one in held:
                one.abandon(Unavailable("a stage of this instance ended"))

    def _fail(self, error: KVCommonsError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _carry_out(self, plan: pb.StagePlan, hidden: Tensor | None) -> None:
        for change in plan.changes:
            self._change(change)
        for link in self._beside:
            link.send(plan.changes, plan.spans, hidden)
        if hidden is None:
            self._pass_on(plan, [], None)
            return
        spread = self._spread(plan.spans)
        generating = [self._advance(span) for span in plan.spans if not span.tokens]
        spans = [self._span(span) for span in plan.spans[len(generating) :]]
        sequences = [held.sequence for held in generating]
        rows = [self._parts.composer.rows(self._batches.of(sequences))] if sequences else []
        iteration = StageIteration(self._core, [*rows, *spans], hidden)
        tokens = iteration.run()
        with self._changed:
            self._report.busy_us += int(iteration.timing.own_s * 1e6)
        if iteration.failures:
            failure = next(iter(iteration.failures.values()))
            if spread is None or not isinstance(failure, KVCommonsError):
                raise failure
            self._drop(plan, spread, failure)
            return
        for row, error in rows[0].lost.items() if rows else ():
            if not plan.spans[row].HasField("lost"):
                plan.spans[row].lost.CopyFrom(error.to_detail())
        if self._link is not None:
            self._pass_on(plan, list(plan.spans), iteration.leaving)
        elif not self._core.model.rank.number:
            self._scored(iteration)
            lost = {span.sequence: span.lost for span in plan.spans if span.HasField("lost")}
            self._sampled(plan, _by_sequence(iteration, tokens, lost))
        for held, span in zip(generating, plan.spans, strict=False):
            if not span.HasField("lost"):  # else its KV is nobody's
                held.computed(self._parts.keeper)
        if spread is not None:
            with self._changed:
                spread.close_window()
                self._changed.notify_all()
        for one in spans:
            key, delivers = one.prompt.key, self._held[one.prompt.key]
            if not isinstance(delivers, HeldPrompt):
                continue
            if one.chunk.stop == one.prompt.tokens:
                delivers.delivery.seal(partial(self._delivered, key))
            elif (undelivered := one.prompt.sink.failure) is not None:
                self._delivered(key, undelivered)

    def _advance(self, span: pb.StageSpan) -> HeldSequence:
        held = self._held[span.sequence]
        if not isinstance(held, HeldSequence):
            raise InvalidInput("a token was planned of a sequence that does not generate here")
        held.advance(span)
        return held

    def _spread(self, spans: Items[pb.StageSpan]) -> HeldSpread | None:
        """The prompt whose chunk these are, where its KV is attended over elsewhere: it is alone then."""
        held = [self._held[span.sequence] for span in spans]
        spread = next((one for one in held if isinstance(one, HeldSpread)), None)
        if spread is not None and len(held) > 1:
            raise InvalidInput("a chunk of a spread prompt was planned beside others")
        return spread

    def _drop(self, plan: pb.StagePlan, spread: HeldSpread, failure: KVCommonsError) -> None:
        """Nothing comes of a chunk, nor of those behind it: what it attends over is out of reach."""
        spread.abandon(failure)
        with self._changed:
            spread.close_window()
        self._delivered(spread.prompt.key, failure)
        self._pass_on(plan, [], None)

    def _span(self, span: pb.StageSpan) -> PromptSpan:
        held = self._held[span.sequence]
        if held.prompt is None:
            raise InvalidInput("a chunk was planned of a sequence whose prompt is not computed here")
        if not span.tokens:
            raise InvalidInput("a chunk without tokens was planned")
        if isinstance(held, HeldSpread):
            with self._changed:
                held.open_window(span.first, list(span.blocks))
        return self._parts.prompts.span(held.prompt, range(span.first, span.first + span.tokens))

    def _prompt(self, key: int) -> HeldPrompt:
        held = self._held[key]
        if not isinstance(held, HeldPrompt):
            raise InvalidInput("holders were to join a sequence whose prompt is not handed over")
        return held

    def _pass_on(self, plan: pb.StagePlan, spans: list[pb.StageSpan], hidden: Tensor | None) -> None:
        if self._link is not None:
            self._link.send(list(plan.changes), spans, hidden, iteration=plan.iteration)
        elif plan.iteration:
            self._sampled(plan, [])

    def _scored(self, iteration: StageIteration) -> None:
        """Logprobs of prompts go into reports as fast as those leave: what a report has is bounded."""
        for number, messages in iteration.prompt_logprobs.items():
            span = iteration.groups[number]
            assert isinstance(span, PromptSpan)
            for logprobs in messages:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._failure or len(self._report.logprobs) < REPORT_LOGPROBS_MAX
                    )
                    self._report.logprobs.add(sequence=span.prompt.key, logprobs=logprobs)
                    self._changed.notify_all()

    def _sampled(self, plan: pb.StagePlan, made: Made) -> None:
        def add(report: pb.StageReport) -> None:
            report.iterations += 1
            for key, token in made:
                report.tokens.add(sequence=key, token=token)

        self._tell(add)

    def _change(self, change: pb.StageChange) -> None:
        kind = change.WhichOneof("change")
        if kind == "begin":
            self._begin(change.begin)
        elif kind == "end":
            self._end(change.end)
        elif kind == "reserve":
            self._reserve(change.reserve)
        elif kind == "grow":
            self._grow(change.grow)
        elif kind == "join":
            self._prompt(change.join.sequence).targets.add(change.join.places)
        elif kind == "load":
            self._load(change.load)
        elif kind == "narrow":
            self._narrow(change.narrow)
        elif kind == "grammar":
            self._prepare(change.grammar)
        else:
            raise InvalidInput("a stage was told to change something that it does not know: run one version")

    def _begin(self, begin: pb.BeginPrompt) -> None:
        core, parts, asked = self._core, self._parts, begin.request
        delivery = Delivery(Deadline.after(begin.deadline_ms / 1000), begin.traceparent)
        targets = TargetTable(asked.targets)
        # KV that another rank has as well, that one hands over.
        handed_over = targets if core.keeps else TargetTable(())
        memory: PromptMemory = parts.whole
        if begin.spread:
            memory = SpreadPrompt(core, parts.keeper, self._spread_over, delivery, targets, core.block_tokens)
        sink = HandOver(parts.pusher, delivery, handed_over, asked.push_from_block, lambda event: None)
        sequence = self._sequence(begin.sequence, asked.job)
        prompt = self._computed_here(sequence, begin, sink, memory, list(begin.blocks))
        prompt.reuse(placed=begin.placed_blocks)
        with self._changed:
            held = HeldSpread if begin.spread else HeldPrompt
            self._held[begin.sequence] = held(prompt, delivery, targets)
        parts.prompts.save_found(prompt)

    def _sequence(self, key: int, job: common_pb2.Job) -> Sequence:
        core, request = self._core, Request.of(job, self._core.info)
        return Sequence(
            key=key,
            request=request,
            block_tokens=core.block_tokens,
            chain=request.chain(core.info),
            constraint=core.constraint(request),
        )

    def _reserve(self, reserve: pb.ReserveSequence) -> None:
        sequence = self._sequence(reserve.sequence, reserve.job)
        runs = self._holders.runs(reserve.runs, 0)
        held = HeldSequence(sequence, runs, shared_blocks=reserve.shared_blocks)
        if reserve.HasField("prompt"):
            held.prompt = self._computed_here(
                sequence, reserve.prompt, StaysHere(), self._parts.whole, held.blocks
            )
            self._parts.prompts.save_found(held.prompt)
        with self._changed:
            self._held[reserve.sequence] = held
            self._changed.notify_all()

    def _computed_here(
        self,
        sequence: Sequence,
        found: pb.BeginPrompt | pb.ComputedPrompt,
        sink: PromptSink,
        memory: PromptMemory,
        blocks: list[int],
    ) -> Prompt:
        """Its prompt, of which so much was `found`."""
        prompt = Prompt(
            sequence=sequence,
            sink=sink,
            memory=memory,
            deadline_s=math.inf,  # the first stage has it
            submitted_s=time.monotonic(),
            blocks=blocks,
            save_from=found.save_from,
        )
        prompt.reuse(device=found.device_blocks, loaded=found.loaded_blocks)
        return prompt

    def _grow(self, grow: pb.GrowSequence) -> None:
        held = self._held[grow.sequence]
        if not isinstance(held, HeldSequence):
            raise InvalidInput("a sequence was to grow that does not generate here")
        with self._changed:
            held.grow(self._holders.runs(grow.runs, held.sequence.blocks))

    def _end(self, end: pb.EndSequence) -> None:
        with self._changed:
            held = self._held[end.sequence]
            held.ended = True
            self._changed.notify_all()
        if not end.finished:
            held.abandon(Unavailable("the job was cancelled"))

    def _load(self, wanted: pb.LoadBlocks) -> None:
        self._parts.condemner.know(data_address=wanted.store_data, control_address=wanted.store_control)
        load = self._parts.histories.load(
            store=wanted.store_data,
            ids=list(wanted.block_ids),
            blocks=list(wanted.blocks),
            deadline=Deadline.after(wanted.deadline_ms / 1000),
        )
        with self._changed:
            self._loads[wanted.load] = load
            self._changed.notify_all()

    def _prepare(self, wanted: pb.PrepareGrammar) -> None:
        core = self._core
        if core.grammars is not None and core.model.last and not core.model.rank.number:
            compiling = core.grammars.compiling(wanted.tenant, wanted.grammar)
            # What is wrong with it the first stage says, which compiles it, too.
            compiling.add_done_callback(
                lambda done: self._tell(lambda report: report.grammars.append(wanted.number))
            )

    def _narrow(self, narrow: pb.NarrowLoad) -> None:
        """One that has ended was reported, or is not looked at any more."""
        with self._changed:
            load = self._loads.get(narrow.load)
            if load is not None and not narrow.blocks:
                del self._loads[narrow.load]
        if load is not None:
            if narrow.blocks:
                load.narrow(narrow.blocks)
            else:
                load.cancel()

    def _delivered(self, key: int, failure: KVCommonsError | None) -> None:
        error = failure.to_detail() if failure is not None else None
        delivered = pb.StageDelivery(sequence=key, error=error)
        self._tell(lambda report: report.delivered.append(delivered))


def _by_sequence(
    iteration: StageIteration,
    tokens: list[list[common_pb2.SampledToken]],
    lost: Mapping[int, common_pb2.ErrorDetail],
) -> Made:
    """What was sampled, by whose it is; of the `lost` sequences why there is no token."""
    made: Made = []
    for group, sampled in zip(iteration.groups, tokens, strict=True):
        if isinstance(group, TokenRows):
            keys = [sequence.key for sequence in group.batch.sequences]
            made += [
                (key, common_pb2.SampledToken(error=lost[key]) if key in lost else token)
                for key, token in zip(keys, sampled, strict=True)
            ]
        elif isinstance(group, PromptSpan):
            made += [(group.prompt.key, token) for token in sampled]
    return made
