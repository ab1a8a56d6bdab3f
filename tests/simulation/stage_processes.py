"""Stages beside the first of a schedule, and what lies between it and them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcommons.errors import DataLoss, Unavailable
from kvcommons.pb import common_pb2
from kvcommons.pb import data_pb2 as pb
from kvcommons.stages.epoch import EpochState, StageAddress
from tests.simulation.stage_sequences import NOTHING, Label, SimulatedSequence, following

if TYPE_CHECKING:
    from tests.simulation.stage_schedule import StageSchedule

LOST = DataLoss("a holder has no more what it had of the sequence")


class SimulatedStage:
    """One beside the first, or a rank of one: its memory, what it is sent, and copies of blocks on their way
    to decode."""

    def __init__(self, world: StageSchedule, number: int) -> None:
        self.world, self.number = world, number
        self.epoch: SimulatedEpoch | None = None
        self.content: dict[int, Label] = {}
        self.inbox: deque[pb.StagePlan] = deque()
        self.held: dict[int, list[int]] = {}
        self.windows: dict[int, dict[int, int]] = {}  # of spread prompts: blocks by their index
        self.places: dict[int, int] = {}  # of prompts, that it knows of
        self.dropped: set[int] = set()  # spread prompts of which nothing more is computed
        self.tokens: dict[int, list[int]] = {}  # of those held that generate
        self.local: set[int] = set()  # those whose prompt is computed here
        self.shared: dict[int, int] = {}  # leading blocks of them that nobody writes to
        self.over: set[int] = set()  # held, ended by the first stage
        self.done: set[int] = set()  # held, all of it computed
        self.pushes: list[tuple[int, int, Label]] = []  # prompt, block, what it has to be
        self.writes: list[tuple[int, int, int]] = []  # sequence, its block's index, and the block
        self.report = pb.StageReport()

    def die(self) -> None:
        self.__init__(self.world, self.number)  # type: ignore[misc]

    def leave(self) -> None:
        """The epoch is over: nothing more is computed, what is on its way is on its way."""
        self.epoch = None
        self.inbox.clear()
        self.held, self.over, self.done, self.report = {}, set(), set(), pb.StageReport()
        self.tokens, self.shared, self.windows, self.dropped, self.local = {}, {}, {}, set(), set()

    def compute(self) -> None:
        """The next plan, once what a spread prompt attends over has arrived."""
        assert self.epoch is not None
        world = self.world
        if any(key in self.windows and key in self.pending for key in _prompts(self.inbox[0])):
            return
        plan = self.inbox.popleft()
        stage, rank = divmod(self.number, world.tensor)
        for beside in range(1, 1 if rank else world.tensor):
            self.epoch.lines[self.number + beside].append(plan)
        for change in plan.changes:
            if change.HasField("begin"):
                self.held[change.begin.sequence] = list(change.begin.blocks)
                self.places[change.begin.sequence] = len(change.begin.request.targets)
                if change.begin.spread:
                    self.windows[change.begin.sequence] = {}
            elif change.HasField("reserve"):
                reserve = change.reserve
                self.held[reserve.sequence] = [block for run in reserve.runs for block in run.blocks]
                self.tokens[reserve.sequence] = list(world.sequences[reserve.sequence].prompt)
                self.shared[reserve.sequence] = reserve.shared_blocks
                if reserve.HasField("prompt"):
                    self.local.add(reserve.sequence)
            elif change.HasField("grow"):
                self.held[change.grow.sequence] += [block for run in change.grow.runs for block in run.blocks]
            elif change.HasField("join"):
                self.places[change.join.sequence] += len(change.join.places)
            elif change.HasField("end"):
                self.over.add(change.end.sequence)
        if self.drops(plan):
            plan = pb.StagePlan(changes=plan.changes, iteration=plan.iteration)
        for span in plan.spans:
            if not span.tokens:
                self.generate(span)
                continue
            if span.sequence in self.local:
                self.compute_here(span)
                continue
            if self.places[span.sequence] <= span.first:
                raise AssertionError(f"stage {self.number}: block {span.first} has no place")
            if span.sequence in self.windows:
                self.compute_window(span)
                continue
            prompt, blocks = world.prompts[span.sequence], self.held[span.sequence]
            for index in range(span.first):
                self.check(blocks[index], prompt.labels[index], "a chunk attends over")
            self.content[blocks[span.first]] = prompt.labels[span.first]
            first = 0 if span.first == prompt.device_blocks else span.first
            self.pushes += [
                (span.sequence, blocks[index], prompt.labels[index]) for index in range(first, span.first + 1)
            ]
            if span.first + 1 == len(prompt.labels):
                self.done.add(span.sequence)
        if rank:
            return
        if stage < world.stages - 1:
            self.epoch.lines[self.number + world.tensor].append(plan)
            return
        self.report.iterations += plan.iteration
        for span in plan.spans:
            if not span.tokens:
                token = common_pb2.SampledToken(token=following(self.tokens[span.sequence]))
                if span.HasField("lost"):
                    token = common_pb2.SampledToken(error=span.lost)
            elif span.sequence in self.local:
                tokens = self.tokens[span.sequence]
                if span.first + 1 < len(tokens):
                    continue
                token = common_pb2.SampledToken(token=following(tokens))
            elif span.first + 1 == len(world.prompts[span.sequence].labels):
                token = common_pb2.SampledToken(token=1, position=span.first + 1)
            else:
                continue
            self.report.tokens.add(sequence=span.sequence, token=token)

    def drops(self, plan: pb.StagePlan) -> bool:
        """Whether nothing comes of a chunk of a spread prompt, for a holder is gone, nor of those behind
        it."""
        for span in plan.spans:
            if span.sequence in self.windows and (self.world.loses() or span.sequence in self.dropped):
                self.dropped.add(span.sequence)
                self.windows[span.sequence][span.first] = span.blocks[0]
                self.report.delivered.add(sequence=span.sequence, error=LOST.to_detail())
                return True
        return False

    def compute_window(self, span: pb.StageSpan) -> None:
        """The next block of a spread prompt, whose earlier ones are elsewhere."""
        prompt, (block,) = self.world.prompts[span.sequence], span.blocks
        for label in prompt.labels[: span.first]:
            if (self.number, span.sequence, label) not in self.world.arrived:
                raise AssertionError(f"stage {self.number}: a chunk attends over {label}, which is not there")
        self.windows[span.sequence][span.first] = block
        self.content[block] = prompt.labels[span.first]
        self.pushes.append((span.sequence, block, prompt.labels[span.first]))
        if span.first + 1 == len(prompt.labels):
            self.done.add(span.sequence)

    def compute_here(self, span: pb.StageSpan) -> None:
        """The next block of a prompt whose sequence goes on here."""
        tokens, blocks = self.tokens[span.sequence], self.held[span.sequence]
        for index in range(span.first):
            self.check(blocks[index], tuple(tokens[: index + 1]), "a chunk attends over")
        self.content[blocks[span.first]] = tuple(tokens[: span.first + 1])

    @property
    def pending(self) -> list[int]:
        """Prompts of which something is on its way."""
        return [key for key, _, _ in self.pushes]

    def generate(self, span: pb.StageSpan) -> None:
        tokens, blocks = self.tokens[span.sequence], self.held[span.sequence]
        if span.first != len(tokens):
            raise AssertionError(f"token {span.first} came where {len(tokens)} was due")
        for index in range(span.first):
            self.check(blocks[index], tuple(tokens[: index + 1]), "a token attends over")
        tokens.append(span.token)
        if not span.HasField("lost") and self.world.loses():
            span.lost.CopyFrom(LOST.to_detail())
        self.content[blocks[span.first]] = NOTHING if span.HasField("lost") else tuple(tokens)

    def begin_write(self, sequence: SimulatedSequence, index: int) -> None:
        """Prefill sends a block; the stage takes it where it knows whose it is."""
        if sequence.key in self.held and sequence.key not in self.over:
            if index < self.shared[sequence.key]:
                raise AssertionError("prefill writes to a block that others have")
            self.writes.append((sequence.key, index, self.held[sequence.key][index]))

    def end_write(self, at: int) -> None:
        key, index, block = self.writes.pop(at)
        sequence = self.world.sequences[key]
        self.content[block] = sequence.prompt[: index + 1]
        sequence.unwritten.discard((self.number, index))

    def push(self, at: int) -> None:
        """One copy arrives."""
        key, block, label = self.pushes.pop(at)
        self.check(block, label, "decode is sent")
        self.world.arrived.add((self.number, key, label))

    def look(self) -> None:
        """What has ended is reported."""
        pending = self.pending
        using = {block for _, block, _ in self.pushes} | {block for _, _, block in self.writes}
        for key, windows in self.windows.items():
            for first in [first for first, block in windows.items() if block not in using]:
                del windows[first]
                self.report.windows.add(sequence=key, first=first)
        for key, blocks in list(self.held.items()):
            if key in self.done and key not in pending:
                self.done.discard(key)
                self.report.delivered.add(sequence=key)
            if key in self.over and not using & {*blocks, *self.windows.get(key, {}).values()}:
                del self.held[key]
                self.windows.pop(key, None)
                self.dropped.discard(key)
                self.over.discard(key)
                self.report.ended.append(key)

    def check(self, block: int, label: Label, what: str) -> None:
        if self.content.get(block) != label:
            raise AssertionError(f"stage {self.number}: {what} {self.content.get(block)} as {label}")


def _prompts(plan: pb.StagePlan) -> list[int]:
    """Of which a plan has chunks."""
    return [span.sequence for span in plan.spans if span.tokens]


class SimulatedEpoch(EpochState):
    """Its connections are queues."""

    def __init__(self, world: StageSchedule, members: Sequence[StageAddress]) -> None:
        super().__init__(world.draw.getrandbits(60), members, stages=world.stages)
        self.world = world
        self.lines: dict[int, deque[pb.StagePlan]] = {number: deque() for number in self.numbers}
        self.open = True
        self.heard = True  # the first process lives in which it began

    def join(self, writer: str) -> None:
        """Raises Unavailable where a stage still has something of the last epoch on its way."""
        for number in self.numbers:
            stage = self.world.stage[number]
            if stage.epoch is not None:
                stage.leave()
            if stage.pushes or stage.writes:
                raise Unavailable("blocks of the epoch before are still on their way")
        for number in self.numbers:
            self.world.stage[number].epoch = self

    def follow(self) -> None:
        pass

    def send(
        self, changes: Sequence[pb.StageChange], spans: Sequence[pb.StageSpan] = (), iteration: Any = None
    ) -> None:
        plan = pb.StagePlan(changes=changes, spans=spans, iteration=iteration is not None)
        if self.open and self.world.stages > 1:
            self.lines[self.world.tensor].append(plan)
        if self.open and iteration is None:
            self._beside(plan)

    def share(self, spans: Sequence[pb.StageSpan], hidden: Any) -> None:
        if self.open:
            self._beside(pb.StagePlan(spans=spans))

    def _beside(self, plan: pb.StagePlan) -> None:
        for rank in range(1, self.world.tensor):
            self.lines[rank].append(plan)

    def close(self) -> None:
        self.open = False
