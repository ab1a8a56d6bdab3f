"""The other processes of an instance, from where the first one is: what it plans goes from stage to stage,
and to the ranks of its own; what they report comes back from each.

An epoch begins when all stages have joined and ends when anything goes wrong with any of them: all sequences
fail, as those of an instance that died, and what was found in the stages' memory is found no more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from kvcommons.blockstore.saver import BlockSaver
from kvcommons.engine.core import Core
from kvcommons.engine.engine import Engine
from kvcommons.engine.history import Condemner, Load
from kvcommons.engine.iteration import Rows
from kvcommons.engine.mailbox import reply
from kvcommons.engine.prompt import FirstToken, Prompt, StaysHere
from kvcommons.engine.prompts import PromptSpan
from kvcommons.engine.request import Request
from kvcommons.engine.sequence import LocalRun
from kvcommons.engine.sequence import Sequence as Generating
from kvcommons.engine.token_rows import TokenRows
from kvcommons.errors import DataLoss, DeadlineExceeded, KVCommonsError, Loading, Unavailable, from_detail
from kvcommons.grammar.grammars import COMPILE_S, GRAMMARS_MAX
from kvcommons.model.tensor_rank import TensorRank
from kvcommons.pb import common_pb2, prefill_pb2
from kvcommons.pb import data_pb2 as pb
from kvcommons.prefill.handover import HandOver, Listener
from kvcommons.prefill.push import Delivery, Pusher
from kvcommons.prefill.targets import TargetTable
from kvcommons.rblock.heads import transfers
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.stages.attending import run_message
from kvcommons.stages.connected import ConnectedEpoch
from kvcommons.stages.division import LayerDivision
from kvcommons.stages.epoch import EpochState, StageAddress
from kvcommons.stages.history import StagedLoad
from kvcommons.stages.iteration import StageIteration
from kvcommons.stages.metrics import StageMetrics
from kvcommons.stages.ranks import RankGroup
from kvcommons.transport.deadline import Deadline

log = logging.getLogger(__name__)

MEASURED_ITERATIONS = 256  # by which stages are compared


class Landing(Protocol):
    """What hears of iterations that have left the first stage. Called on the engine's thread."""

    def landed(self, iteration: StageIteration, tokens: Mapping[int, common_pb2.SampledToken]) -> None:
        """One has left the last stage, too, which sampled these tokens, by sequence. Raises ValueError where
        they are not those that it should have."""

    def scored(self, key: int, logprobs: common_pb2.PromptLogprobs) -> None:
        """The last stage has read these of a prompt's own tokens, before the token that follows it."""

    def abandoned(self) -> None:
        """Those that are under way will not: their epoch is over."""


class StagedHandOver(HandOver):
    """A prompt's sink at the first stage: the other ones hand over their layers themselves."""

    def __init__(
        self,
        group: StageGroup,
        asked: prefill_pb2.PrefillRequest,
        key: int,
        pusher: Pusher,
        delivery: Delivery,
        targets: TargetTable,
        listener: Listener,
    ) -> None:
        super().__init__(pusher, delivery, targets, asked.push_from_block, listener)
        self.asked = asked
        self.announced = 0  # of its targets, to the other processes
        self._group = group
        self._key = key

    def finished(self, prompt: Prompt, first: FirstToken) -> None:
        self._group.end(self._key, finished=True)
        super().finished(prompt, first)

    def failed(self, error: KVCommonsError) -> None:
        self._group.end(self._key, finished=False)
        super().failed(error)

    def cancelled(self) -> None:
        self._group.end(self._key, finished=False)
        super().cancelled()


Epochs = Callable[["StageGroup", Sequence[StageAddress]], EpochState]


class StageGroup:
    """Belongs to the engine's thread, but for `form`, `formed`, `check`, `places`, `reserve`, `load` and
    `close`."""

    landing: Landing  # set by the executor

    def __init__(
        self,
        core: Core,
        division: LayerDivision,
        *,
        metrics: StageMetrics,
        saver: BlockSaver,
        condemner: Condemner,
        iteration_s: float,
        instance_id: str,
        changed: Callable[[], None],
        ranks: RankGroup | None = None,
        dialer: Dialer = UNSECURED,
        epochs: Epochs | None = None,
    ) -> None:
        """`division` hears once an epoch what each stage took. `iteration_s`: what an iteration takes through
        all stages, at most. `ranks`: where a stage has several, those of the first stage. `changed` is
        called, on any thread, when an epoch has begun or ended. `epochs` makes them; None: over the data
        plane."""
        self.core = core
        self._division = division
        self._metrics = metrics
        self._saver = saver
        self._condemner = condemner
        self._iteration_s = iteration_s
        self._instance_id = instance_id
        self._changed = changed
        self.ranks = ranks
        self._tensor = ranks.rank.ranks if ranks is not None else 1
        self._epochs = epochs or partial(ConnectedEpoch, dialer=dialer)
        self.engine: Engine
        self._epoch: EpochState | None = None
        self._numbers = itertools.count(1)  # of loads, and of grammars
        self._grammars: dict[tuple[str, str], int] = {}  # by tenant and text, the least recently used first
        self.shortfall = "its other stages have not started yet"

    def attach(self, engine: Engine) -> None:
        self.engine = engine

    def sink(
        self,
        asked: prefill_pb2.PrefillRequest,
        key: int,
        pusher: Pusher,
        delivery: Delivery,
        targets: TargetTable,
        listener: Listener,
    ) -> StagedHandOver:
        """A prompt's. Raises Loading while stages are missing, InvalidInput where it is to go to a head
        group, or to ranks, whose parts are no shares of the ranks' heads here."""
        self.check()
        for target in targets.now:
            transfers(self.core.heads, target.head_parts)
        return StagedHandOver(self, asked, key, pusher, delivery, targets, listener)

    @property
    def stages(self) -> int:
        return len(self._division.ranges)

    @property
    def formed(self) -> bool:
        return self._epoch is not None

    def check(self) -> EpochState:
        """The epoch that is. Raises Loading while stages are missing."""
        formed = self._epoch
        if formed is None:
            raise Loading(f"this instance lacks stages: {self.shortfall}", retry_after_ms=500)
        return formed

    def places(
        self, formed: EpochState, key: int, own: common_pb2.SegmentPlace
    ) -> list[common_pb2.PlacedLayers]:
        """Where each process takes its heads of its layers of a sequence that is reserved, the first one at
        its `own` place."""
        first = common_pb2.PlacedLayers(data_address=own.data_address, handle=own.handle, epoch=own.epoch)
        others = [
            common_pb2.PlacedLayers(data_address=member.data_address, handle=key, epoch=formed.number)
            for member in formed.members
        ]
        placed = [first, *others]
        for member, one in enumerate(placed):
            stage, rank = divmod(member, self._tensor)
            layers = self._division.ranges[stage]
            one.first_layer, one.layers = layers.start, len(layers)
            part = TensorRank(number=rank, ranks=self._tensor).kv_part(self.core.info.kv_heads)
            if part is not None:
                one.heads.CopyFrom(part.message())
        return placed

    def reserve(
        self, formed: EpochState, sequence: Generating, job: common_pb2.Job, *, shared_blocks: int
    ) -> None:
        """A sequence that the engine was just given is to generate here; its leading `shared_blocks` nobody
        writes to. It fails where the epoch in which it was given its blocks is over."""
        self.engine.post(lambda: self._reserve(formed, sequence, job, shared_blocks))

    async def prepared(self, request: Request) -> None:
        """Returns once the stage that samples its answer has compiled what that is held to. Raises
        Unavailable, DeadlineExceeded."""
        if not request.grammar or self.core.model.last:
            return
        answer: Future[Any] = Future()  # another one, that is done when it is compiled
        self.engine.post(lambda: reply(answer, self._prepare(request.tenant, request.grammar)))
        try:
            async with asyncio.timeout(COMPILE_S):
                await asyncio.shield(asyncio.wrap_future(await asyncio.wrap_future(answer)))
        except TimeoutError:
            raise DeadlineExceeded(
                "the grammar is not compiled in all stages yet: simplify it, or retry later"
            ) from None

    def came_apart(self, formed: EpochState) -> KVCommonsError | None:
        """Why nothing comes of a sequence that was given its blocks in that epoch."""
        return (
            None if self._epoch is formed else Unavailable("the stages came apart: go on elsewhere, or here")
        )

    def form(self, members: Sequence[StageAddress]) -> None:
        """Has all of them join a new epoch, in the order of their numbers. Blocks; raises what one of them
        raises, Unavailable, DeadlineExceeded."""
        formed = self._epochs(self, members)
        writer = f"{self._instance_id}-{formed.number:x}"
        try:
            formed.join(writer)
        except BaseException:
            formed.close()
            raise
        self._saver.writer = writer
        self._epoch = formed
        formed.follow()
        log.info(
            "the stages are together",
            extra={"epoch": f"{formed.number:x}", "stages": len(self._division.ranges)},
        )
        self._changed()

    def close(self) -> None:
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            epoch.close()

    # Below: the engine's thread.

    def _prepare(self, tenant: str, text: str) -> Future[None]:
        """Each once in an epoch, while it is among those that a process keeps."""
        formed = self._epoch
        if formed is None:
            done: Future[None] = Future()
            done.set_exception(Unavailable(self.shortfall))
            return done
        number = self._grammars.pop((tenant, text), 0)
        self._grammars[tenant, text] = number = number or next(self._numbers)
        while len(self._grammars) > GRAMMARS_MAX // 2:
            oldest = self._grammars.pop(next(iter(self._grammars)))
            if oldest in formed.grammars and formed.grammars[oldest].done():  # else somebody waits for it
                del formed.grammars[oldest]
        if number not in formed.grammars:
            formed.grammars[number] = Future()
            prepare = pb.PrepareGrammar(number=number, tenant=tenant, grammar=text)
            formed.send([pb.StageChange(grammar=prepare)])
        return formed.grammars[number]

    def takes_more(self) -> bool:
        """Whether a further iteration would not only wait in front of the next stage. Ends an epoch in which
        one does not come to its end, though all stages say that they are there."""
        formed = self._epoch
        if formed is not None and formed.outstanding.late(time.monotonic(), self._iteration_s):
            self.lost(formed, DeadlineExceeded(f"an iteration took longer than {self._iteration_s:.0f} s"))
        return self._epoch is not None and not self._epoch.outstanding.full

    @property
    def shared(self) -> Callable[[StageIteration, Tensor], None] | None:
        """An iteration's `entered`: what the ranks beside this one begin with. None: there are none."""
        return self._share if self._tensor > 1 else None

    def enter(self, iteration: StageIteration) -> None:
        """It belongs to the epoch that is: what comes of it means nothing to the next one."""
        iteration.epoch = 0 if self._epoch is None else self._epoch.number
        if self.ranks is not None:
            self.ranks.enter(iteration.epoch)

    def _epoch_of(self, iteration: StageIteration) -> EpochState | None:
        """None where it is over."""
        formed = self._epoch
        return formed if formed is not None and formed.number == iteration.epoch else None

    def _share(self, iteration: StageIteration, hidden: Tensor) -> None:
        formed = self._epoch_of(iteration)
        if formed is None:
            raise Unavailable(self.shortfall)
        changes, spans = self._planned(formed, iteration.groups)
        if changes:
            formed.send(changes)
        formed.share(spans, hidden)

    def failed(self, iteration: StageIteration) -> None:
        """It could not be carried out here: a rank is gone, or waits for what this one has not summed up."""
        formed = self._epoch_of(iteration)
        if formed is not None and self._tensor > 1:
            self._took(formed, 0, iteration.timing.own_s)
            self.lost(
                formed, Unavailable("an iteration of several ranks failed; the first one's log says why")
            )

    def pass_on(self, iteration: StageIteration) -> bool:
        """What the first stage has computed goes to the next one. False where there is none, or nothing to
        go."""
        formed = self._epoch_of(iteration)
        if formed is None:
            return False
        self._took(formed, 0, iteration.timing.own_s)
        if iteration.leaving is None:
            return False
        groups = [iteration.groups[number] for number in iteration.going_on]
        changes, spans = self._planned(formed, groups)
        if changes and self._tensor > 1:  # of meanwhile: the ranks beside this one hear of them, too
            formed.send(changes)
            changes = []
        iteration.left_s = time.monotonic()
        formed.outstanding.passed_on(iteration.left_s, iteration)
        formed.send(changes, spans, iteration)
        return True

    def _planned(
        self, formed: EpochState, groups: Sequence[Rows]
    ) -> tuple[list[pb.StageChange], list[pb.StageSpan]]:
        """What the other processes do not know yet of these groups' sequences, and what they compute of
        them."""
        changes, spans = list[pb.StageChange](), list[pb.StageSpan]()
        for group in groups:
            if isinstance(group, TokenRows):
                lost = group.lost  # by this stage
                for row, sequence in enumerate(group.batch.sequences):
                    changes += self._grow(formed, sequence)
                    spans.append(
                        pb.StageSpan(
                            sequence=sequence.key,
                            first=sequence.computed,
                            token=sequence.tokens[-1],
                            lost=lost[row].to_detail() if row in lost else None,
                        )
                    )
                continue
            assert isinstance(group, PromptSpan), "there are no other rows"
            changes += self._prompt_changes(formed, group.prompt)
            spans.append(self._span(formed, group))
        return changes, spans

    def _prompt_changes(self, formed: EpochState, prompt: Prompt) -> list[pb.StageChange]:
        """That it begins, and which holders have joined it."""
        sink = prompt.sink
        if isinstance(sink, StaysHere):
            return [] if formed.outstanding.begun(prompt.key) else [self._begin_here(formed, prompt, sink)]
        assert isinstance(sink, StagedHandOver)
        places, known = sink.targets.places, sink.announced
        sink.announced = len(places)
        if not formed.outstanding.begun(prompt.key):
            sink.asked.targets.extend(places[len(sink.asked.targets) :])
            return [self._begin(formed, prompt, sink)]
        if known < len(places):
            return [pb.StageChange(join=pb.JoinTargets(sequence=prompt.key, places=places[known:]))]
        return []

    def _span(self, formed: EpochState, group: PromptSpan) -> pb.StageSpan:
        key, chunk, blocks = group.prompt.key, group.chunk, list[int]()
        if not group.prompt.memory.keeps:
            size = group.prompt.block_tokens
            blocks = group.prompt.blocks[chunk.start // size : -(-chunk.stop // size)]
            if formed.outstanding.open_window(key, chunk.start, blocks):
                self.core.allocator.retain(blocks)
        return pb.StageSpan(sequence=key, first=chunk.start, tokens=len(chunk), blocks=blocks)

    def end(self, key: int, *, finished: bool) -> None:
        """Nothing more is computed of a prompt; unknown ones are ignored."""
        formed = self._epoch
        if formed is not None and formed.outstanding.begun(key):
            formed.send([pb.StageChange(end=pb.EndSequence(sequence=key, finished=finished))])

    def leave(self, key: int) -> None:
        """A sequence has ended: nothing more is computed of it, if it generates here."""
        formed = self._epoch
        if formed is not None and key in formed.generating:
            del formed.generating[key]
            self.end(key, finished=True)

    def load(
        self, store: str, ids: Sequence[bytes], blocks: Sequence[int], deadline: Deadline, own: Load
    ) -> StagedLoad:
        """The other stages load the same blocks in their layers."""
        number, formed = next(self._numbers), self._epoch
        if formed is None:
            load = StagedLoad(own, (), lambda blocks: None)
            load.ended_at(0, 0)
            return load

        def narrow(blocks: int) -> None:
            if not blocks:
                formed.loads.pop(number, None)
            formed.send([pb.StageChange(narrow=pb.NarrowLoad(load=number, blocks=blocks))])

        load = formed.loads[number] = StagedLoad(own, formed.numbers, narrow)
        wanted = pb.LoadBlocks(
            load=number,
            store_data=store,
            store_control=self._condemner.control_of(store),
            block_ids=ids,
            blocks=blocks,
            deadline_ms=deadline.left_ms(),
        )
        formed.send([pb.StageChange(load=wanted)])
        if self._epoch is not formed:  # it ended before it knew of the load
            self._end_loads(formed)
        return load

    def _reserve(
        self, formed: EpochState, sequence: Generating, job: common_pb2.Job, shared_blocks: int
    ) -> None:
        if sequence.ended:
            return
        gone = self.came_apart(formed)
        if gone is not None:
            self.engine.fail(sequence.key, gone)
            return
        reserve = self._held(formed, sequence, job)
        reserve.shared_blocks = shared_blocks
        formed.send([pb.StageChange(reserve=reserve)])

    def _begin_here(self, formed: EpochState, prompt: Prompt, sink: StaysHere) -> pb.StageChange:
        """A prompt whose sequence goes on here: before its first chunk its blocks may become others."""
        assert sink.job is not None, "a prompt of an instance in stages"
        reserve = self._held(formed, prompt.sequence, sink.job)
        reserve.prompt.device_blocks = prompt.device_blocks
        reserve.prompt.loaded_blocks = prompt.loaded_blocks
        reserve.prompt.save_from = prompt.save_from
        return pb.StageChange(reserve=reserve)

    def _held(self, formed: EpochState, sequence: Generating, job: common_pb2.Job) -> pb.ReserveSequence:
        """Its blocks are nobody else's before all stages have ended it."""
        blocks = sequence.local_blocks()
        self.core.allocator.retain(blocks)
        formed.outstanding.begin(sequence.key, blocks, delivers=False)
        formed.generating[sequence.key] = sequence.blocks
        runs = [run_message(run) for run in sequence.runs]
        return pb.ReserveSequence(sequence=sequence.key, job=job, runs=runs)

    def _grow(self, formed: EpochState, sequence: Generating) -> list[pb.StageChange]:
        """What the other stages do not know yet of its room."""
        key, known = sequence.key, formed.generating[sequence.key]
        if known == sequence.blocks:
            return []
        new = sequence.runs_from(known)
        blocks = [block for run in new if isinstance(run, LocalRun) for block in run.blocks]
        self.core.allocator.retain(blocks)
        formed.outstanding.grow(key, blocks)
        formed.generating[key] = sequence.blocks
        grow = pb.GrowSequence(sequence=key, runs=[run_message(run) for run in new])
        return [pb.StageChange(grow=grow)]

    def _begin(self, formed: EpochState, prompt: Prompt, sink: StagedHandOver) -> pb.StageChange:
        blocks = prompt.blocks if prompt.memory.keeps else []
        self.core.allocator.retain(blocks)
        formed.outstanding.begin(prompt.key, blocks)
        formed.deliveries[prompt.key] = sink.delivery
        sink.delivery.begin_elsewhere(len(formed.numbers))
        begin = pb.BeginPrompt(
            sequence=prompt.key,
            request=sink.asked,
            spread=not prompt.memory.keeps,
            blocks=blocks,
            device_blocks=prompt.device_blocks,
            loaded_blocks=prompt.loaded_blocks,
            placed_blocks=prompt.placed_blocks,
            save_from=prompt.save_from,
            deadline_ms=sink.delivery.deadline.left_ms(),
            traceparent=sink.delivery.traceparent,
        )
        return pb.StageChange(begin=begin)

    def hear(self, formed: EpochState, stage: int, report: pb.StageReport) -> None:
        """What a stage reports; of an epoch that has ended nothing."""
        if self._epoch is not formed:
            return
        try:
            self._take(formed, stage, report)
        except ValueError as error:
            self.lost(formed, DataLoss(f"stage {stage}: {error}"))

    def _take(self, formed: EpochState, stage: int, report: pb.StageReport) -> None:
        done = formed.outstanding.done(report.iterations)
        self._took(formed, stage, report.busy_us / 1e6)
        formed.iterations += report.iterations
        if formed.iterations >= MEASURED_ITERATIONS > formed.iterations - report.iterations:
            self._division.measured(formed.busy_s)
        for load in report.loads:
            known = formed.loads.get(load.load)
            if known is not None and not known.awaits_others:
                del formed.loads[load.load]
        for delivered in report.delivered:
            if formed.outstanding.delivered(delivered.sequence, stage):
                failure = from_detail(delivered.error) if delivered.HasField("error") else None
                formed.deliveries[delivered.sequence].end_elsewhere(failure)
                if failure is not None:  # of a spread prompt's last chunk no token comes
                    self.engine.fail(delivered.sequence, failure)
        for number in report.grammars:
            compiled = formed.grammars.get(number)
            if compiled is not None and not compiled.done():
                compiled.set_result(None)
        for window in report.windows:
            blocks = formed.outstanding.left_window(window.sequence, window.first, stage)
            self.core.allocator.release(blocks)
        for read in report.logprobs:
            self.landing.scored(read.sequence, read.logprobs)
        tokens = {made.sequence: made.token for made in report.tokens}
        for iteration in done:
            self.landing.landed(iteration, tokens)
        for key in report.ended:
            self.core.allocator.release(formed.outstanding.ended(key, stage))
            if not formed.outstanding.begun(key):
                formed.deliveries.pop(key, None)

    def _took(self, formed: EpochState, member: int, seconds: float) -> None:
        stage, rank = divmod(member, self._tensor)
        if not rank:
            formed.busy_s[stage] += seconds
        self._metrics.busy(stage, rank, seconds)

    def lost(self, formed: EpochState, error: KVCommonsError) -> None:
        """A stage is gone, or what came of it was wrong."""
        if self._epoch is not formed:
            return
        self._epoch = None
        self.shortfall = error.message
        formed.close()
        log.warning("the stages came apart: %s", error.message, extra={"epoch": f"{formed.number:x}"})
        gone = Unavailable(f"a stage of this instance ended: {error.message}")
        blocks, undelivered = formed.outstanding.abandon()
        self._end_loads(formed)
        for compiled in formed.grammars.values():
            if not compiled.done():
                compiled.set_exception(gone)
        self.landing.abandoned()
        self.engine.fail_all(gone)
        for key, _ in undelivered:
            formed.deliveries[key].end_elsewhere(gone)
        self.core.allocator.release(blocks)
        self.core.allocator.forget()
        self._changed()

    def _end_loads(self, formed: EpochState) -> None:
        """Nothing more is heard of them."""
        for load in list(formed.loads.values()):
            for stage in formed.numbers:
                load.ended_at(stage, 0)
