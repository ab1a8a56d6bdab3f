"""A process of an instance beside the first: it computes what it is planned, in the blocks that it is told,
and decides nothing.

Its memory has the same physical blocks as the first stage's, in its own layers. Who has which of them only
the first stage knows, so that nothing has to be agreed on; here all of them are in use all the time, and a
block has more than one reference while it is on its way to decode or to the kvstore.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from kvcommons.backend.memory import byte_view
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.engine.core import Core
from kvcommons.engine.executor import Composer
from kvcommons.engine.history import Condemner, Histories, Load
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.engine.prompt import Prompt
from kvcommons.engine.prompt_memory import WholePrompt
from kvcommons.engine.prompts import Prompts, PromptSpan
from kvcommons.engine.read_buffer import ReadBuffer
from kvcommons.engine.remote.attention import RemoteAttention
from kvcommons.engine.request import Request
from kvcommons.engine.scheduler import Scheduler
from kvcommons.engine.sequence import Sequence
from kvcommons.engine.token_rows import TokenRows
from kvcommons.errors import (
    InvalidInput,
    KVCommonsError,
    Overloaded,
    StaleEpoch,
    Unavailable,
    UnsupportedParameter,
)
from kvcommons.holder.budget import AttentionBudget
from kvcommons.pb import common_pb2
from kvcommons.pb import data_pb2 as pb
from kvcommons.prefill.handover import HandOver
from kvcommons.prefill.push import Delivery, Pusher
from kvcommons.prefill.targets import Target, TargetTable
from kvcommons.rblock.heads import HeadPart
from kvcommons.rblock.layout import Layout
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.stages.attending import AttendedHolders
from kvcommons.stages.batches import SteppedBatches
from kvcommons.stages.held import Held, HeldPrompt, HeldSequence
from kvcommons.stages.iteration import StageIteration
from kvcommons.stages.link import StageLink
from kvcommons.stages.ranks import RankGroup
from kvcommons.telemetry.telemetry import Telemetry
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.server import Exchange

log = logging.getLogger(__name__)

REPORT_S = 0.5  # between two reports, at most: each end notices that the other one is gone
REPORT_SEND_S = 5.0
REPORT_LOGPROBS_MAX = 8  # messages of a report; each is of bounded size
Made = list[tuple[int, common_pb2.SampledToken]]  # tokens by sequence
LOOK_S = 0.005  # between looks at what ends by itself: loads, and what is on its way out
QUIET_S = 15.0  # until nothing of the epoch before is under way any more
RESERVED_S = 2.0  # a write waits so long for the plan that says whose blocks it is for
GONE_MAX = 4096  # sequences that have ended are known, so that nobody waits for them
ITERATION_S = 1.0  # nobody asks: a stage attends for no one else


class Follower:
    """A DataServer's handler. Of one epoch at a time: whoever asks it to join ends the one before."""

    def __init__(
        self,
        core: Core,
        number: int,
        *,
        keeper: BlockKeeper,
        saver: BlockSaver,
        histories: Histories,
        condemner: Condemner,
        push_deadline_s: float,
        attend_deadline_s: float,
        telemetry: Telemetry,
        ranks: RankGroup | None = None,
        dialer: Dialer = UNSECURED,
    ) -> None:
        """`number`: which stage it is. A layer waits `attend_deadline_s` for other holders. `ranks`: its own
        among several."""
        self.core = core
        self._number = number
        self._ranks = ranks
        self._keeper = keeper
        self._saver = saver
        self._condemner = condemner
        self._dialer = dialer
        self._pusher = Pusher(
            core.memory,
            core.allocator,
            call_deadline_s=push_deadline_s,
            dialer=dialer,
            heads=core.heads,
        )
        self._histories = histories
        self._prompts = Prompts(
            core,
            Scheduler(),  # that is the first stage's business
            chunk_tokens=1,
            keeper=keeper,
            histories=histories,
            read_buffer=ReadBuffer(layers=len(core.layers), bytes_max=0),
            tracer=telemetry.tracer,
        )
        self._whole = WholePrompt(core, self._prompts)
        remote = RemoteAttention(core.layout, core.backend, AttentionBudget(ITERATION_S))
        self._composer = Composer(core, remote, attend_deadline_s=attend_deadline_s)
        self._blocks = core.allocator.allocate(core.allocator.total)
        self._lock = threading.Lock()
        self._epoch: _Epoch | None = None
        self._joining = threading.Lock()  # by one at a time

    @property
    def sequences(self) -> int:
        """That it computes."""
        epoch = self._epoch
        return epoch.held if epoch is not None else 0

    def __call__(self, request: pb.DataRequest, exchange: Exchange) -> None:
        op = request.WhichOneof("op")
        if op == "join_stages":
            self._join(request.join_stages, exchange)
        elif op == "stage_plan":
            self._take(request.stage_plan, exchange)
        elif op == "write_blocks":
            self._write(request.write_blocks, exchange)
        elif op == "join_ranks" and self._ranks is not None:
            self._ranks.welcome(request.join_ranks, exchange)
        else:
            raise UnsupportedParameter(f"a pipeline stage does not answer {op}", param="op")

    def close(self) -> None:
        """Ends the epoch: the first stage hears of it as its reports end."""
        with self._lock:
            epoch, self._epoch = self._epoch, None
        if epoch is not None:
            epoch.end(Unavailable("this stage is stopping"))
        self._pusher.stop()

    def _join(self, join: pb.JoinStages, exchange: Exchange) -> None:
        self._check(join)
        with self._joining:
            with self._lock:
                before, self._epoch = self._epoch, None
            if before is not None:
                before.end(Unavailable("the stages were put together anew"))
            self._await_quiet(before)
            self._saver.writer = join.writer
            epoch = _Epoch(self, join)
            with self._lock:
                self._epoch = epoch
        epoch.start()
        try:
            while True:
                exchange.deadline = Deadline.after(REPORT_SEND_S)
                exchange.reply(pb.DataReply(stage_report=epoch.report()))
                epoch.await_report(REPORT_S)
        finally:
            epoch.end(Unavailable("the first stage is gone"))

    def _check(self, join: pb.JoinStages) -> None:
        core = self.core
        if join.model != core.info.fingerprint:
            raise InvalidInput(
                "the first stage has another model: start all stages with one model, dtype and block_tokens",
                param="model",
            )
        rank, last = core.model.rank, core.layers.stop == core.model.spec.layers
        mine = (join.number, join.rank, len(join.above)) == (
            self._number,
            rank.number,
            rank.ranks - 1 - rank.number,
        )
        if not mine or (not rank.number and bool(join.next_address) == last):
            raise InvalidInput(
                f"this is rank {rank.number} of {rank.ranks} of stage {self._number}, of layers "
                f"{core.layers.start} … {core.layers[-1]}, and was taken for rank {join.rank} of stage "
                f"{join.number}: start all with the same stages, stage_layers and tensor",
                param="number",
            )
        if join.blocks > core.allocator.total:
            raise InvalidInput(
                f"the first stage has {join.blocks} blocks, and this one {core.allocator.total}: start all "
                "stages with one capacity_tokens",
                param="capacity_tokens",
            )

    def _await_quiet(self, before: _Epoch | None) -> None:
        """Nothing reads or writes the blocks any more, which are whoever's from here on. Raises
        Overloaded."""
        deadline = Deadline.after(QUIET_S)
        while (before is not None and before.computes) or not self.core.allocator.held_once(self._blocks):
            self._keeper.make_room()
            if deadline.passed():
                raise Overloaded(
                    "blocks of the epoch before are still on their way: retry", retry_after_ms=500
                )
            time.sleep(LOOK_S)

    def _take(self, plan: pb.StagePlan, exchange: Exchange) -> None:
        exchange.one_way = True
        with self._lock:
            epoch = self._epoch
        if epoch is None or epoch.number != plan.epoch:
            return  # of one that has ended: whoever sent it knows, or will hear
        try:
            rows, total = sum(span.tokens or 1 for span in plan.spans), self.core.allocator.total
            if rows > total * self.core.block_tokens:
                raise InvalidInput(f"a plan has {rows} rows, more than there are tokens of memory here")
            hidden: Tensor | None = None
            if rows:
                hidden = torch.empty((rows, self.core.model.spec.hidden), dtype=self.core.model.dtype)
                exchange.receive_payload([byte_view(hidden)])
            epoch.put(plan, hidden)
        except KVCommonsError as error:
            epoch.end(error)
            raise

    def _write(self, write: pb.WriteBlocks, exchange: Exchange) -> None:
        """A layer of a prompt that was computed elsewhere."""
        memory = self.core.memory
        part = HeadPart.of(write.heads) if write.HasField("heads") else None
        own = memory.layout if part is None else part.layout(memory.layout)
        if write.layer not in self.core.layers:
            raise InvalidInput(
                f"layer {write.layer}, and this stage has {self.core.layers.start} … {self.core.layers[-1]}",
                param="layer",
            )
        with self._lock:
            epoch = self._epoch
        if epoch is None or epoch.number != write.epoch:
            raise StaleEpoch("the stages have been put together anew since the blocks were reserved")
        with epoch.writable(write, exchange.deadline.within(RESERVED_S)) as blocks:
            due = len(blocks) * own.object_bytes
            if exchange.payload_bytes != due:
                raise InvalidInput(
                    f"{len(blocks)} blocks came with {exchange.payload_bytes} bytes, not {due}"
                )
            with memory.write_buffers(write.layer, blocks, part) as buffers:
                exchange.receive_payload(buffers)
        exchange.reply(pb.DataReply(done=pb.Done()))


class _Epoch:
    """One life of the group, at this stage: a thread that carries out plans in their order."""

    def __init__(self, follower: Follower, join: pb.JoinStages) -> None:
        self.number = join.epoch
        self._follower = follower
        self._core = follower.core
        self._link = StageLink(join.next_address, join.epoch, follower._dialer) if join.next_address else None
        beside = [] if join.rank else join.above
        self._beside = [StageLink(address, join.epoch, follower._dialer) for address in beside]
        self._above = list(join.above)
        self._plans: queue.SimpleQueue[tuple[pb.StagePlan, Tensor | None] | None] = queue.SimpleQueue()
        self._received = 0
        self._batches = SteppedBatches(self._core)
        self._holders = AttendedHolders(Layout.of(self._core.info), self._core.heads, follower._dialer)
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
        if self._follower._ranks is not None:
            self._follower._ranks.leave(self.number)

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
                watching = self._loads or any(held.ended for held in self._held.values())
                self._changed.wait(min(until.left(), LOOK_S if watching else within_s))

    def _look(self) -> bool:
        """Whether there is something to report; what has ended by itself is."""
        report, last = self._report, self._core.layers[-1]
        for number, load in list(self._loads.items()):
            if load.ended or load.arrived(last):
                del self._loads[number]
                report.loads.add(load=number, blocks=load.wait(last, Deadline.after(0)))
        for key, held in list(self._held.items()):
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
        ranks = self._follower._ranks
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
            self._fail(
                Unavailable(f"stage {self._follower._number} failed: {type(error).__name__}; see its log")
            )
        finally:
            if ranks is not None:
                ranks.leave(self.number)
            with self._changed:
                loads, self._loads = list(self._loads.values()), {}
                held = list(self._held.values())
            self._holders.close()
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
        generating = [self._advance(span) for span in plan.spans if not span.tokens]
        spans = [self._span(span) for span in plan.spans[len(generating) :]]
        sequences = [held.sequence for held in generating]
        rows = [self._follower._composer.rows(self._batches.of(sequences))] if sequences else []
        iteration = StageIteration(self._core, [*rows, *spans], hidden)
        tokens = iteration.run()
        with self._changed:
            self._report.busy_us += int(iteration.timing.own_s * 1e6)
        if iteration.failures:
            raise next(iter(iteration.failures.values()))
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
                held.computed(self._follower._keeper)
        for one in spans:
            if one.chunk.stop == one.prompt.tokens:
                self._seal(one.prompt.key)
            elif (failure := one.prompt.sink.failure) is not None:
                self._delivered(one.prompt.key, failure)

    def _advance(self, span: pb.StageSpan) -> HeldSequence:
        held = self._held[span.sequence]
        if not isinstance(held, HeldSequence):
            raise InvalidInput("a token was planned of a sequence that does not generate here")
        held.advance(span)
        return held

    def _span(self, span: pb.StageSpan) -> PromptSpan:
        held = self._held[span.sequence]
        if not isinstance(held, HeldPrompt) or not span.tokens:
            raise InvalidInput("a chunk was planned of a sequence whose prompt is not computed here")
        return self._follower._prompts.span(held.prompt, range(span.first, span.first + span.tokens))

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
        elif kind == "load":
            self._load(change.load)
        elif kind == "narrow":
            self._narrow(change.narrow)
        else:
            raise InvalidInput("a stage was told to change something that it does not know: run one version")

    def _begin(self, begin: pb.BeginPrompt) -> None:
        core, follower, asked = self._core, self._follower, begin.request
        request = Request.of(asked.job, core.info)
        delivery = Delivery(Deadline.after(begin.deadline_ms / 1000), begin.traceparent)
        # KV that another rank has as well, that one hands over.
        targets = TargetTable(Target.of(placement) for placement in asked.targets if core.keeps)
        prompt = Prompt(
            sequence=Sequence(
                key=begin.sequence,
                request=request,
                block_tokens=core.block_tokens,
                chain=request.chain(core.info),
                constraint=core.constraint(request),
            ),
            sink=HandOver(follower._pusher, delivery, targets, asked.push_from_block, lambda event: None),
            memory=follower._whole,
            deadline_s=time.monotonic() + begin.deadline_ms / 1000,
            submitted_s=time.monotonic(),
            blocks=list(begin.blocks),
            save_from=begin.save_from,
        )
        prompt.reuse(device=begin.device_blocks, loaded=begin.loaded_blocks)
        with self._changed:
            self._held[begin.sequence] = HeldPrompt(prompt, delivery)
        follower._prompts.save_found(prompt)

    def _reserve(self, reserve: pb.ReserveSequence) -> None:
        core, request = self._core, Request.of(reserve.job, self._core.info)
        sequence = Sequence(
            key=reserve.sequence,
            request=request,
            block_tokens=core.block_tokens,
            chain=request.chain(core.info),
            constraint=core.constraint(request),
        )
        runs = self._holders.runs(reserve.runs, 0)
        held = HeldSequence(sequence, runs, shared_blocks=reserve.shared_blocks)
        with self._changed:
            self._held[reserve.sequence] = held
            self._changed.notify_all()

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
        self._follower._condemner.know(data_address=wanted.store_data, control_address=wanted.store_control)
        load = self._follower._histories.load(
            store=wanted.store_data,
            ids=list(wanted.block_ids),
            blocks=list(wanted.blocks),
            deadline=Deadline.after(wanted.deadline_ms / 1000),
        )
        with self._changed:
            self._loads[wanted.load] = load
            self._changed.notify_all()

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

    def _seal(self, key: int) -> None:
        held = self._held[key]
        assert isinstance(held, HeldPrompt)
        held.delivery.seal(lambda failure: self._delivered(key, failure))

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
