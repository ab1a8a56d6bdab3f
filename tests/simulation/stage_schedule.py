"""Seeded schedules of the stages' protocol: the first stage's own group, bookkeeping and allocator, beside
stages of which every message, copy and death comes when the dice say so.

A block's content is the tokens up to its end, by which it is checked whenever anything reads it: attention
of a later chunk, and what is on its way to decode. So a block that is given away too soon, or found after its
stage has died, shows. What must hold in the end: each prompt has its token or an error, a token only after
all stages have delivered, and no block is in use.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from kvcommons.engine.prompt import FirstToken
from kvcommons.engine.prompts import PromptSpan
from kvcommons.errors import CapacityExhausted, KVCommonsError, Unavailable
from kvcommons.pb import common_pb2, prefill_pb2
from kvcommons.pb import data_pb2 as pb
from kvcommons.prefill.push import Delivery
from kvcommons.rblock.allocator import BlockAllocator
from kvcommons.stages.group import EpochState, StageAddress, StagedHandOver, StageGroup
from kvcommons.transport.deadline import Deadline

BLOCKS = 10
EVENTS = 250
Label = tuple[int, ...]


class SimulatedPrompt:
    """One token a block. `told` takes the queueing time, then the result."""

    def __init__(self, world: StageSchedule, key: int, tokens: Label) -> None:
        self.key, self.tokens = key, tokens
        self.labels = [tokens[: index + 1] for index in range(len(tokens))]
        self.ids = [bytes(label) for label in self.labels]
        self.told: list[int | FirstToken | KVCommonsError] = []
        self.delivery = Delivery(Deadline.after(1e6), "")
        asked = prefill_pb2.PrefillRequest()
        self.sink = StagedHandOver(world.group, asked, key, world.pusher, self.delivery, (), self.tell)
        self.blocks: list[int] = []
        self.device_blocks = self.loaded_blocks = self.save_from = self.computed = 0
        self.world = world
        self.ended = False

    def tell(self, event: int | FirstToken | KVCommonsError) -> None:
        self.told.append(event)
        if not isinstance(event, KVCommonsError):
            for number in self.world.stage:
                for label in self.labels:
                    if (number, self.key, label) not in self.world.arrived:
                        raise AssertionError(f"a token, though stage {number} has not delivered {label}")


class SimulatedSpan(PromptSpan):
    """The next block of a prompt."""

    def __init__(self, prompt: Any, chunk: range) -> None:
        self.prompt, self.chunk = prompt, chunk


class SimulatedStage:
    """One behind the first: its memory, what it is sent, and copies of blocks on their way to decode."""

    def __init__(self, world: StageSchedule, number: int) -> None:
        self.world, self.number = world, number
        self.epoch: SimulatedEpoch | None = None
        self.content: dict[int, Label] = {}
        self.inbox: deque[pb.StagePlan] = deque()
        self.held: dict[int, list[int]] = {}
        self.over: set[int] = set()  # held, ended by the first stage
        self.done: set[int] = set()  # held, all of it computed
        self.pushes: list[tuple[int, int, Label]] = []  # prompt, block, what it has to be
        self.report = pb.StageReport()

    def die(self) -> None:
        self.__init__(self.world, self.number)  # type: ignore[misc]

    def leave(self) -> None:
        """The epoch is over: nothing more is computed, what is on its way is on its way."""
        self.epoch = None
        self.inbox.clear()
        self.held, self.over, self.done, self.report = {}, set(), set(), pb.StageReport()

    def compute(self) -> None:
        """The next plan."""
        assert self.epoch is not None
        plan, world = self.inbox.popleft(), self.world
        for change in plan.changes:
            if change.HasField("begin"):
                self.held[change.begin.prompt] = list(change.begin.blocks)
            elif change.HasField("end"):
                self.over.add(change.end.prompt)
        for span in plan.spans:
            prompt, blocks = world.prompts[span.prompt], self.held[span.prompt]
            for index in range(span.first):
                self.check(blocks[index], prompt.labels[index], "a chunk attends over")
            self.content[blocks[span.first]] = prompt.labels[span.first]
            first = 0 if span.first == prompt.device_blocks else span.first
            self.pushes += [
                (span.prompt, blocks[index], prompt.labels[index]) for index in range(first, span.first + 1)
            ]
            if span.first + 1 == len(prompt.labels):
                self.done.add(span.prompt)
        if self.number < world.stages - 1:
            self.epoch.lines[self.number + 1].append(plan)
            return
        self.report.iterations += plan.iteration
        for span in plan.spans:
            if span.first + 1 == len(world.prompts[span.prompt].labels):
                token = common_pb2.SampledToken(token=1, position=span.first + 1)
                self.report.tokens.add(prompt=span.prompt, token=token)

    def push(self, at: int) -> None:
        """One copy arrives."""
        key, block, label = self.pushes.pop(at)
        self.check(block, label, "decode is sent")
        self.world.arrived.add((self.number, key, label))

    def look(self) -> None:
        """What has ended is reported."""
        pending = [key for key, _, _ in self.pushes]
        using = {block for _, block, _ in self.pushes}
        for key, blocks in list(self.held.items()):
            if key in self.done and key not in pending:
                self.done.discard(key)
                self.report.delivered.add(prompt=key)
            if key in self.over and not using & set(blocks):
                del self.held[key]
                self.over.discard(key)
                self.report.ended.append(key)

    def check(self, block: int, label: Label, what: str) -> None:
        if self.content.get(block) != label:
            raise AssertionError(f"stage {self.number}: {what} {self.content.get(block)} as {label}")


class SimulatedEpoch(EpochState):
    """Its connections are queues."""

    def __init__(self, world: StageSchedule, members: Sequence[StageAddress]) -> None:
        super().__init__(world.draw.getrandbits(60), members)
        self.world = world
        self.lines: dict[int, deque[pb.StagePlan]] = {number: deque() for number in self.numbers}
        self.open = True

    def join(self, writer: str) -> None:
        """Raises Unavailable where a stage still has something of the last epoch on its way."""
        for number in self.numbers:
            stage = self.world.stage[number]
            if stage.epoch is not None:
                stage.leave()
            if stage.pushes:
                raise Unavailable("blocks of the epoch before are still on their way")
        for number in self.numbers:
            self.world.stage[number].epoch = self

    def follow(self) -> None:
        pass

    def send(
        self, changes: Sequence[pb.StageChange], spans: Sequence[pb.StageSpan] = (), iteration: Any = None
    ) -> None:
        if self.open:
            plan = pb.StagePlan(changes=changes, spans=spans, iteration=iteration is not None)
            self.lines[1].append(plan)

    def close(self) -> None:
        self.open = False


class StageSchedule:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.stages = self.draw.randrange(2, 5)
        self.prompts: dict[int, SimulatedPrompt] = {}
        self.waiting: list[int] = []
        self.computing: list[int] = []
        self.posted: deque[Callable[[], None]] = deque()
        self.arrived: set[tuple[int, int, Label]] = set()
        self.content: dict[int, Label] = {}  # of the first stage's memory
        self.pusher: Any = SimpleNamespace(write=lambda *args: None)
        allocator = BlockAllocator(BLOCKS)
        self.allocator = allocator
        core: Any = SimpleNamespace(allocator=allocator)
        ignored: Any = SimpleNamespace(busy=lambda *args: None, writer="", control_of=lambda address: "")
        ranges = [range(number, number + 1) for number in range(self.stages)]
        self.group = StageGroup(
            core, ranges, metrics=ignored, saver=ignored, condemner=ignored, iteration_s=1e6, instance_id="p",
            changed=lambda: None, epochs=lambda group, members: SimulatedEpoch(self, members),
        )  # fmt: skip
        engine: Any = SimpleNamespace(
            post=self.posted.append, sampled=self.sampled, fail_prompts=self.fail_prompts
        )
        self.group.attach(engine)
        self.stage = {number: SimulatedStage(self, number) for number in range(1, self.stages)}

    def run(self) -> None:
        for _ in range(EVENTS):
            self.event(kills=True)
        for _ in range(100_000):
            if self.quiet():
                break
            self.event(kills=False)
        else:
            raise AssertionError("it never comes to rest")
        self.check_end()

    def event(self, *, kills: bool) -> None:
        actions: list[Callable[[], None]] = [self.serve, self.engine, self.engine, self.form]
        for number, stage in self.stage.items():
            actions += [lambda number=number: self.deliver_plan(number)] * 2
            actions += [stage.look, lambda stage=stage: self.report(stage)]
            if stage.inbox:
                actions += [stage.compute] * 2
            if stage.pushes:
                actions.append(lambda stage=stage: stage.push(self.draw.randrange(len(stage.pushes))))
        if kills:
            actions.append(self.submit)
            if self.draw.random() < 0.2:
                actions.append(self.cancel)
            if self.draw.random() < 0.1:
                actions.append(self.kill)
        self.draw.choice(actions)()

    # What happens.

    def submit(self) -> None:
        key = len(self.prompts) + 1
        tokens = tuple(self.draw.randrange(2) for _ in range(self.draw.randrange(1, 5)))
        self.prompts[key] = SimulatedPrompt(self, key, tokens)
        self.waiting.append(key)

    def cancel(self) -> None:
        alive = self.waiting + self.computing
        if alive:
            prompt = self.prompts[self.draw.choice(alive)]
            prompt.sink.cancelled()
            prompt.told.append(Unavailable("cancelled"))
            self.finish(prompt)

    def kill(self) -> None:
        number = self.draw.choice(list(self.stage))
        epoch = self.stage[number].epoch
        self.stage[number].die()
        if epoch is not None:
            self.posted.append(lambda: self.group.lost(epoch, Unavailable(f"stage {number} died")))

    def form(self) -> None:
        if not self.group.formed:
            members = [StageAddress(number=number, data_address="") for number in self.stage]
            try:
                self.group.form(members)
            except Unavailable:
                return

    def deliver_plan(self, number: int) -> None:
        stage = self.stage[number]
        if stage.epoch is not None and stage.epoch.lines[number]:
            stage.inbox.append(stage.epoch.lines[number].popleft())

    def report(self, stage: SimulatedStage) -> None:
        epoch = stage.epoch
        if epoch is not None and stage.report.ByteSize():
            report, stage.report = stage.report, pb.StageReport()
            self.posted.append(lambda: self.group.hear(epoch, stage.number, report))

    # The engine's thread.

    def serve(self) -> None:
        if self.posted:
            self.posted.popleft()()

    def engine(self) -> None:
        """Admits one prompt, then computes one iteration, as the engine does."""
        if self.waiting and self.group.formed:
            self.admit(self.prompts[self.waiting[0]])
        able = [key for key in self.computing if self.prompts[key].computed < len(self.prompts[key].labels)]
        if not able or not self.group.takes_more():
            return
        chosen = [self.prompts[key] for key in able if self.draw.random() < 0.7]
        spans = []
        for prompt in chosen:
            at = prompt.computed
            for index in range(at):
                if self.content.get(prompt.blocks[index]) != prompt.labels[index]:
                    raise AssertionError("the first stage attends over another block")
            self.content[prompt.blocks[at]] = prompt.labels[at]
            spans.append(SimulatedSpan(prompt, range(at, at + 1)))
        if not spans:
            return
        iteration: Any = SimpleNamespace(
            leaving=object(), groups=spans, going_on=range(len(spans)), timing=SimpleNamespace(own_s=0.0)
        )
        self.group.pass_on(iteration)
        for prompt in chosen:
            self.allocator.publish(prompt.blocks[prompt.computed], prompt.ids[prompt.computed])
            prompt.computed += 1

    def admit(self, prompt: SimulatedPrompt) -> None:
        found = self.allocator.match(prompt.ids[:-1])  # the last one is always computed
        try:
            prompt.blocks = found + self.allocator.allocate(len(prompt.ids) - len(found))
        except CapacityExhausted:
            self.allocator.release(found)
            return
        prompt.device_blocks = prompt.computed = len(found)
        self.waiting.remove(prompt.key)
        self.computing.append(prompt.key)

    def sampled(self, key: int, token: common_pb2.SampledToken) -> None:
        prompt = self.prompts[key]
        if not prompt.ended:
            self.finish(prompt)
            first: Any = SimpleNamespace(token=token)
            prompt.sink.finished(prompt, first)  # type: ignore[arg-type]

    def fail_prompts(self, error: KVCommonsError) -> None:
        for key in self.computing + self.waiting:
            prompt = self.prompts[key]
            self.finish(prompt)
            prompt.sink.failed(error)

    def finish(self, prompt: SimulatedPrompt) -> None:
        prompt.ended = True
        for keys in (self.waiting, self.computing):
            if prompt.key in keys:
                keys.remove(prompt.key)
        self.allocator.release(prompt.blocks)

    # What has to hold.

    def quiet(self) -> bool:
        busy = self.waiting or self.computing or self.posted or not self.group.formed
        epoch = next(iter(self.stage.values())).epoch
        lines = epoch is not None and any(epoch.lines.values())
        stages = any(
            stage.inbox or stage.pushes or stage.held or stage.report.ByteSize()
            for stage in self.stage.values()
        )
        return not (busy or lines or stages)

    def check_end(self) -> None:
        if self.allocator.in_use:
            raise AssertionError(f"{self.allocator.in_use} blocks stay in use")
        for key, prompt in self.prompts.items():
            if len(prompt.told) != 1:
                raise AssertionError(f"prompt {key} was told {len(prompt.told)} results")
