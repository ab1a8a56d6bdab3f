"""The stages behind the first, from where the first one is: what it plans goes down the line, what they
report comes back from each.

An epoch begins when all stages have joined and ends when anything goes wrong with any of them: all prompts
fail, as those of an instance that died, and what was found in the stages' memory is found no more.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from google.protobuf.message import DecodeError

from kvcommons.blockstore.saver import BlockSaver
from kvcommons.engine.core import Core
from kvcommons.engine.engine import Engine
from kvcommons.engine.history import Condemner, Load
from kvcommons.engine.prompt import FirstToken, Prompt
from kvcommons.engine.prompts import PromptSpan
from kvcommons.errors import DataLoss, DeadlineExceeded, KVCommonsError, Loading, Unavailable, from_detail
from kvcommons.model.layer_ranges import better_division
from kvcommons.pb import data_pb2 as pb
from kvcommons.pb import prefill_pb2
from kvcommons.prefill.handover import HandOver, Listener
from kvcommons.prefill.push import Delivery, Pusher
from kvcommons.prefill.targets import Target
from kvcommons.stages.history import StagedLoad
from kvcommons.stages.iteration import StageIteration
from kvcommons.stages.link import StageLink
from kvcommons.stages.metrics import StageMetrics
from kvcommons.stages.outstanding import OutstandingWork
from kvcommons.transport.base import Connection, Observer
from kvcommons.transport.client import DataClient
from kvcommons.transport.deadline import Deadline

log = logging.getLogger(__name__)

JOIN_S = 20.0  # a stage that has to end another epoch first waits until its blocks are quiet
SILENCE_S = 5.0  # reports come twice a second
MEASURED_ITERATIONS = 256  # by which stages are compared
UNEVEN = 0.05  # of the slowest stage's time: what another division has to save


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAddress:
    """A stage behind the first, and where it is reached on the data plane."""

    number: int
    data_address: str


class StagedHandOver(HandOver):
    """A prompt's sink at the first stage: the other ones hand over their layers themselves."""

    def __init__(
        self,
        group: StageGroup,
        asked: prefill_pb2.PrefillRequest,
        key: int,
        pusher: Pusher,
        delivery: Delivery,
        targets: tuple[Target, ...],
        listener: Listener,
    ) -> None:
        super().__init__(pusher, delivery, targets, asked.push_from_block, listener)
        self.asked = asked
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


class EpochState:
    """One life of the group, from where the first stage is: what it has under way with the others. How they
    are reached is what differs."""

    def __init__(self, number: int, members: Sequence[StageAddress]) -> None:
        self.number = number
        self.members = members
        self.numbers = tuple(member.number for member in members)
        self.outstanding = OutstandingWork(self.numbers, iterations_max=len(members) + 1)
        self.iterations = 0  # that have left the line
        self.busy_s = [0.0] * (len(members) + 1)  # by stage
        self.deliveries: dict[int, Delivery] = {}
        self.loads: dict[int, StagedLoad] = {}

    def join(self, writer: str) -> None:
        """Returns once all stages belong to it; they save as `writer`. Raises what one of them raises."""
        raise NotImplementedError

    def follow(self) -> None:
        """Hears what they report, from now on."""
        raise NotImplementedError

    def send(
        self,
        changes: Sequence[pb.StageChange],
        spans: Sequence[pb.StageSpan] = (),
        iteration: StageIteration | None = None,
    ) -> None:
        """Down the line, in order. What is wrong with it ends the epoch, after what the engine does now."""
        raise NotImplementedError

    def close(self) -> None:
        """It has ended."""
        raise NotImplementedError


Epochs = Callable[["StageGroup", Sequence[StageAddress]], EpochState]


class StageGroup:
    """Belongs to the engine's thread, but for `form`, `formed`, `check` and `close`."""

    def __init__(
        self,
        core: Core,
        ranges: Sequence[range],
        *,
        metrics: StageMetrics,
        saver: BlockSaver,
        condemner: Condemner,
        iteration_s: float,
        instance_id: str,
        changed: Callable[[], None],
        observer: Observer | None = None,
        epochs: Epochs | None = None,
    ) -> None:
        """`ranges`: layers of all stages. `iteration_s`: what one takes through the line, at most.
        `changed` is called, on any thread, when an epoch has begun or ended. `epochs` makes them; None: over
        the data plane."""
        self.core = core
        self._ranges = ranges
        self._metrics = metrics
        self._saver = saver
        self._condemner = condemner
        self._iteration_s = iteration_s
        self._instance_id = instance_id
        self._changed = changed
        self._epochs = epochs or partial(_Connected, observer=observer)
        self.engine: Engine
        self._epoch: EpochState | None = None
        self._loads = itertools.count(1)
        self.shortfall = "its other stages have not started yet"

    def attach(self, engine: Engine) -> None:
        self.engine = engine

    def sink(
        self,
        asked: prefill_pb2.PrefillRequest,
        key: int,
        pusher: Pusher,
        delivery: Delivery,
        targets: tuple[Target, ...],
        listener: Listener,
    ) -> StagedHandOver:
        """A prompt's. Raises Loading while stages are missing."""
        self.check()
        return StagedHandOver(self, asked, key, pusher, delivery, targets, listener)

    @property
    def formed(self) -> bool:
        return self._epoch is not None

    def check(self) -> None:
        """Raises Loading while stages are missing."""
        if not self.formed:
            raise Loading(f"this prefill lacks stages: {self.shortfall}", retry_after_ms=500)

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
            "the stages are together", extra={"epoch": f"{formed.number:x}", "stages": len(self._ranges)}
        )
        self._changed()

    def close(self) -> None:
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            epoch.close()

    # Below: the engine's thread.

    def takes_more(self) -> bool:
        """Whether a further iteration would not only wait in front of the next stage. Ends an epoch in which
        one does not come to its end, though all stages say that they are there."""
        formed = self._epoch
        if formed is not None and formed.outstanding.late(time.monotonic(), self._iteration_s):
            self.lost(formed, DeadlineExceeded(f"an iteration took longer than {self._iteration_s:.0f} s"))
        return self._epoch is not None and not self._epoch.outstanding.full

    def pass_on(self, iteration: StageIteration) -> None:
        """What the first stage has computed goes to the next one."""
        formed = self._epoch
        if formed is None or iteration.leaving is None:
            return
        groups = [iteration.groups[number] for number in iteration.going_on]
        changes, spans = list[pb.StageChange](), list[pb.StageSpan]()
        for group in groups:
            assert isinstance(group, PromptSpan), "prompts only are computed in stages"
            if not formed.outstanding.begun(group.prompt.key):
                changes.append(self._begin(formed, group.prompt))
            spans.append(
                pb.StageSpan(prompt=group.prompt.key, first=group.chunk.start, tokens=len(group.chunk))
            )
        formed.outstanding.passed_on(time.monotonic())
        formed.send(changes, spans, iteration)
        self._took(formed, 0, iteration.timing.own_s)

    def end(self, key: int, *, finished: bool) -> None:
        """Nothing more is computed of a prompt; unknown ones are ignored."""
        formed = self._epoch
        if formed is not None and formed.outstanding.begun(key):
            formed.send([pb.StageChange(end=pb.EndPrompt(prompt=key, finished=finished))])

    def load(
        self, store: str, ids: Sequence[bytes], blocks: Sequence[int], deadline: Deadline, own: Load
    ) -> StagedLoad:
        """The other stages load the same blocks in their layers."""
        number, formed = next(self._loads), self._epoch
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
        return load

    def _begin(self, formed: EpochState, prompt: Prompt) -> pb.StageChange:
        sink = prompt.sink
        assert isinstance(sink, StagedHandOver)
        self.core.allocator.retain(prompt.blocks)
        formed.outstanding.begin(prompt.key, prompt.blocks)
        formed.deliveries[prompt.key] = sink.delivery
        for _ in formed.numbers:
            sink.delivery.begin()
        begin = pb.BeginPrompt(
            prompt=prompt.key,
            request=sink.asked,
            blocks=prompt.blocks,
            device_blocks=prompt.device_blocks,
            loaded_blocks=prompt.loaded_blocks,
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
        formed.outstanding.done(report.iterations)
        self._took(formed, stage, report.busy_us / 1e6)
        formed.iterations += report.iterations
        if formed.iterations >= MEASURED_ITERATIONS > formed.iterations - report.iterations:
            self._compare(formed)
        for load in report.loads:
            known = formed.loads.get(load.load)
            if known is not None and not known.awaits_others:
                del formed.loads[load.load]
        for delivered in report.delivered:
            if formed.outstanding.delivered(delivered.prompt, stage):
                failure = from_detail(delivered.error) if delivered.HasField("error") else None
                formed.deliveries[delivered.prompt].end(failure)
        for made in report.tokens:
            self.engine.sampled(made.prompt, made.token)
        for key in report.ended:
            self.core.allocator.release(formed.outstanding.ended(key, stage))
            if not formed.outstanding.begun(key):
                formed.deliveries.pop(key, None)

    def _took(self, formed: EpochState, stage: int, seconds: float) -> None:
        formed.busy_s[stage] += seconds
        self._metrics.busy(stage, seconds)

    def _compare(self, formed: EpochState) -> None:
        """Says once an epoch where another division would be better, by what was measured in it."""
        counts, gain = better_division(self._ranges, formed.busy_s)
        if gain > UNEVEN:
            log.info(
                "the stages are uneven: stage_layers = %s would let the slowest take %.0f%% less",
                counts,
                100 * gain,
                extra={"busy_s": [round(seconds, 3) for seconds in formed.busy_s]},
            )

    def lost(self, formed: EpochState, error: KVCommonsError) -> None:
        """A stage is gone, or what came of it was wrong."""
        if self._epoch is not formed:
            return
        self._epoch = None
        self.shortfall = error.message
        formed.close()
        log.warning("the stages came apart: %s", error.message, extra={"epoch": f"{formed.number:x}"})
        gone = Unavailable(f"a stage of this prefill ended: {error.message}")
        blocks, undelivered = formed.outstanding.abandon()
        for load in formed.loads.values():
            for stage in formed.numbers:
                load.ended_at(stage, 0)
        self.engine.fail_prompts(gone)
        for key, _ in undelivered:
            formed.deliveries[key].end(gone)
        self.core.allocator.release(blocks)
        self.core.allocator.forget()
        self._changed()


class _Connected(EpochState):
    """One connection down the line, and one to each stage, on which it reports."""

    def __init__(
        self, group: StageGroup, members: Sequence[StageAddress], observer: Observer | None = None
    ) -> None:
        super().__init__(time.time_ns(), members)
        self._group = group
        self._link = StageLink(members[0].data_address, self.number, observer)
        self._clients = [DataClient(member.data_address, observer=observer) for member in members]
        self._reports: list[Connection] = []
        self._followed = False  # threads have the connections, and close them

    def join(self, writer: str) -> None:
        core, deadline = self._group.core, Deadline.after(JOIN_S)
        following = [member.data_address for member in self.members[1:]] + [""]
        for member, client, address in zip(self.members, self._clients, following, strict=True):
            connection = client.connect(deadline)
            self._reports.append(connection)
            join = pb.JoinStages(
                epoch=self.number,
                model=core.info.fingerprint,
                number=member.number,
                blocks=core.allocator.total,
                next_address=address,
                writer=writer,
            )
            request = pb.DataRequest(deadline_ms=deadline.left_ms(), join_stages=join)
            connection.send(request.SerializeToString(), (), deadline)
        for connection in self._reports:
            _receive(connection, deadline)

    def follow(self) -> None:
        self._followed = True
        for member, connection in zip(self.members, self._reports, strict=True):
            name, arguments = f"stage {member.number}", (member.number, connection)
            threading.Thread(target=self._follow, args=arguments, name=name, daemon=True).start()

    def send(
        self,
        changes: Sequence[pb.StageChange],
        spans: Sequence[pb.StageSpan] = (),
        iteration: StageIteration | None = None,
    ) -> None:
        try:
            hidden = None if iteration is None else iteration.leaving
            self._link.send(changes, spans, hidden, iteration=iteration is not None)
        except KVCommonsError as error:
            self._tell_lost(error)

    def close(self) -> None:
        self._link.close()
        for client in self._clients:
            client.close()
        for connection in self._reports:
            connection.abort()
            if not self._followed:
                connection.close()

    def _follow(self, stage: int, connection: Connection) -> None:
        """A thread of its own for each stage."""
        try:
            while True:
                report = _receive(connection, Deadline.after(SILENCE_S))
                for ended in report.loads:  # at once: the engine's thread may be waiting for it
                    load = self.loads.get(ended.load)
                    if load is not None:
                        load.ended_at(stage, ended.blocks)
                if report.ByteSize():
                    self._group.engine.post(partial(self._group.hear, self, stage, report))
        except KVCommonsError as error:
            self._tell_lost(error)
        finally:
            connection.close()

    def _tell_lost(self, error: KVCommonsError) -> None:
        self._group.engine.post(partial(self._group.lost, self, error))


def _receive(connection: Connection, deadline: Deadline) -> pb.StageReport:
    """Raises what the stage raised, Unavailable, DeadlineExceeded, DataLoss."""
    head, _ = connection.receive_head(deadline)
    connection.drain(deadline)
    try:
        reply = pb.DataReply.FromString(head)
    except DecodeError as error:
        raise DataLoss(f"{connection.peer} sent a head that is no DataReply: run one version") from error
    if reply.HasField("error"):
        raise from_detail(reply.error)
    return reply.stage_report
