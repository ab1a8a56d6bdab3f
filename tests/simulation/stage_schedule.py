"""Seeded schedules of the stages' protocol: the first stage's own group, bookkeeping and allocator, beside
stages, each of one or several ranks, of which every message, copy and death comes when the dice say so, and
the first stage's own.

A block's content is the tokens up to its end, by which it is checked whenever anything reads it: attention
of a later chunk, and what is on its way to decode. So a block that is given away too soon, or found after its
stage has died, shows. What must hold in the end: each prompt has its token or an error, a token only after
all stages have delivered, and no block is in use.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from kvcommons.engine.prompt import NOT_HERE
from kvcommons.errors import CapacityExhausted, KVCommonsError, Loading, Unavailable
from kvcommons.model.tensor_rank import TensorRank
from kvcommons.pb import common_pb2
from kvcommons.pb import data_pb2 as pb
from kvcommons.rblock.allocator import BlockAllocator
from kvcommons.stages.batches import next_batch
from kvcommons.stages.division import LayerDivision
from kvcommons.stages.epoch import StageAddress
from kvcommons.stages.group import StageGroup
from tests.simulation.stage_processes import LOST, SimulatedEpoch, SimulatedStage
from tests.simulation.stage_sequences import (
    NOTHING,
    Label,
    SimulatedLocal,
    SimulatedPrompt,
    SimulatedRows,
    SimulatedSequence,
    SimulatedSpan,
    following,
)

BLOCKS = 10
EVENTS = 250
LOSSES = 0.02  # of a sequence, in an iteration at a stage
SPREAD = 0.3  # of prompts


class StageSchedule:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.tensor = self.draw.choice((1, 1, 2, 3))
        self.stages = self.draw.randrange(2 if self.tensor == 1 else 1, 5 - self.tensor // 2)
        self.prompts: dict[int, SimulatedPrompt] = {}
        self.sequences: dict[int, SimulatedSequence] = {}
        self.arrived: set[tuple[int, int, Label]] = set()
        self.pusher: Any = SimpleNamespace(start_sequence=lambda *args: args[-1](None))
        self.stage = {number: SimulatedStage(self, number) for number in range(1, self.stages * self.tensor)}
        self.begin_first()

    def begin_first(self) -> None:
        """A life of the first process."""
        self.waiting: list[int] = []
        self.computing: list[int] = []
        self.local: list[int] = []  # sequences whose prompt is computed here, and is not yet
        self.generating: list[int] = []
        self.under_way: dict[int, list[Callable[[], None]]] = {}  # what waits for a sequence's token
        self.posted: deque[Callable[[], None]] = deque()
        self.content: dict[int, Label] = {}  # of its memory
        self.pushes: list[SimulatedPrompt] = []  # whose last block is on its way from there
        self.allocator = BlockAllocator(BLOCKS)
        core: Any = SimpleNamespace(allocator=self.allocator)
        ignored: Any = SimpleNamespace(busy=lambda *args: None, writer="", control_of=lambda address: "")
        ranks: Any = SimpleNamespace(rank=TensorRank(ranks=self.tensor), enter=lambda epoch: None)
        division = LayerDivision.said((1,) * self.stages, self.stages)
        self.group = StageGroup(
            core, division, metrics=ignored, saver=ignored, condemner=ignored, iteration_s=1e6,
            instance_id="p", changed=lambda: None, ranks=ranks,
            epochs=lambda group, members: SimulatedEpoch(self, members),
        )  # fmt: skip
        engine: Any = SimpleNamespace(post=self.posted.append, fail=self.fail, fail_all=self.fail_all)
        self.group.attach(engine)
        self.group.landing = self

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
            if stage.writes:
                actions.append(lambda stage=stage: stage.end_write(self.draw.randrange(len(stage.writes))))
        if self.pushes:
            actions.append(self.push)
        if self.generating:
            actions += [self.write] * 2 + [self.generate] * 2
        if kills:
            actions += [self.submit, self.reserve, self.arrive]
            if self.draw.random() < 0.2:
                actions.append(self.cancel_sequence)
            if self.draw.random() < 0.2:
                actions.append(self.cancel)
            if self.draw.random() < 0.1:
                actions.append(self.kill)
            if self.draw.random() < 0.03:
                actions.append(self.kill_first)
        self.draw.choice(actions)()

    # What happens.

    def submit(self) -> None:
        key = len(self.prompts) + 1
        spread = self.draw.random() < SPREAD
        tokens = tuple(self.draw.randrange(2) for _ in range(self.draw.randrange(1, 9 if spread else 5)))
        self.prompts[key] = SimulatedPrompt(self, key, tokens, spread=spread)
        self.waiting.append(key)

    def cancel(self) -> None:
        alive = self.waiting + self.computing
        if alive:
            prompt = self.prompts[self.draw.choice(alive)]
            prompt.sink.cancelled()
            prompt.reported.append(Unavailable("cancelled"))
            self.finish(prompt)

    def reserve(self) -> None:
        """A sequence arrives, as at decode: its blocks first, what the engine makes of it later."""
        try:
            formed = self.group.check()
        except Loading:
            return
        key = 1000 + len(self.sequences)
        prompt = tuple(self.draw.randrange(2) for _ in range(self.draw.randrange(1, 4)))
        one = SimulatedSequence(self, key, prompt, self.draw.randrange(1, 5))
        found = self.allocator.match([bytes(prompt[: index + 1]) for index in range(len(prompt) - 1)])
        try:
            one.physical = found + self.allocator.allocate(len(prompt) + 1 - len(found))
        except CapacityExhausted:
            self.allocator.release(found)
            return
        one.shared = len(found)
        one.unwritten = {(number, index) for number, index in one.unwritten if index >= one.shared}
        self.sequences[key] = one
        self.posted.append(lambda: self.generating.append(key))
        sequence: Any = one
        self.group.reserve(formed, sequence, common_pb2.Job(), shared_blocks=one.shared)

    def arrive(self) -> None:
        """A sequence whose prompt is computed here."""
        try:
            formed = self.group.check()
        except Loading:
            return
        key = 1000 + len(self.sequences)
        prompt = tuple(self.draw.randrange(2) for _ in range(self.draw.randrange(1, 5)))
        one = SimulatedLocal(self, key, prompt, self.draw.randrange(1, 5))
        one.formed = formed
        try:
            one.physical = self.allocator.allocate(len(prompt) + 1)
        except CapacityExhausted:
            return
        self.sequences[key] = one
        self.posted.append(lambda: self.local.append(key))

    def write(self) -> None:
        """Prefill sends one block to one process, or after the last one has come the first token."""
        one = self.sequences[self.draw.choice(self.generating)]
        if not one.unwritten:
            if not one.sampled:
                one.sampled = True
                self.posted.append(lambda: self.start(one))
            return
        number, index = self.draw.choice(sorted(one.unwritten))
        if number:
            self.stage[number].begin_write(one, index)
        else:
            self.content[one.physical[index]] = one.prompt[: index + 1]
            one.unwritten.discard((0, index))

    def start(self, one: SimulatedSequence) -> None:
        """Prefill's first token."""
        if not one.ended and not one.started:
            self.append(one, following(one.prompt))

    def cancel_sequence(self) -> None:
        alive = self.generating + self.local
        if alive:
            self.fail(self.draw.choice(alive), Unavailable("cancelled"))

    def kill(self) -> None:
        number = self.draw.choice(list(self.stage))
        epoch = self.stage[number].epoch
        self.stage[number].die()
        if epoch is not None:
            self.posted.append(lambda: self.group.lost(epoch, Unavailable(f"stage {number} died")))

    def kill_first(self) -> None:
        """What it has sent may still be carried out; nobody hears of it. Callers hear that it is gone."""
        for stage in self.stage.values():
            if stage.epoch is not None:
                stage.epoch.close()
                stage.epoch.heard = False
        for prompt in self.prompts.values():
            prompt.ended = True
            if not prompt.reported:
                prompt.reported.append(Unavailable("the first stage died"))
        for one in self.sequences.values():
            if not one.ended:
                one.ended = True
                one.results.append("the first stage died")
        self.begin_first()

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
            if not epoch.heard:
                return
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
        if not self.group.takes_more():
            return
        chosen = [self.prompts[key] for key in able if self.draw.random() < 0.7]
        if chosen and chosen[0].spread and self.compute_window(chosen[0]):
            return
        spans = self.chunks([prompt for prompt in chosen if not prompt.spread])
        if spans:
            self.iterate(spans)
            self.computed(spans)

    def chunks(self, chosen: Sequence[SimulatedPrompt]) -> list[SimulatedSpan]:
        """Of these, and of some that go on here: the next block of each."""
        going_on = [self.sequences[key] for key in list(self.local) if self.draw.random() < 0.5]
        prompts: list[SimulatedPrompt | SimulatedLocal] = list(chosen)
        prompts += [one for one in going_on if isinstance(one, SimulatedLocal) and self.may_compute(one)]
        spans = []
        for prompt in prompts:
            at = prompt.computed
            blocks = prompt.physical if isinstance(prompt, SimulatedLocal) else prompt.blocks
            for index in range(at):
                if self.content.get(blocks[index]) != prompt.labels[index]:
                    raise AssertionError("the first stage attends over another block")
            self.content[blocks[at]] = prompt.labels[at]
            if isinstance(prompt, SimulatedPrompt):
                prompt.join(at + self.draw.randrange(1, 3))
            spans.append(SimulatedSpan(prompt, range(at, at + 1)))
        return spans

    def may_compute(self, one: SimulatedLocal) -> bool:
        """Whether its next block can be; with the first one, what is known by then takes the place of its
        own."""
        assert one.formed is not None
        gone = self.group.came_apart(one.formed)
        if gone is not None:
            self.fail(one.key, gone)
            return False
        if not one.admitted:
            found = self.allocator.match([bytes(label) for label in one.labels[:-1]])
            self.allocator.release(one.physical[: len(found)])
            one.physical[: len(found)] = found
            one.device_blocks = one.computed = len(found)
            one.admitted = True
        return one.computed < len(one.labels)

    def computed(self, spans: Sequence[SimulatedSpan]) -> None:
        for span in spans:
            prompt, at = span.prompt, span.chunk.start
            blocks = prompt.physical if isinstance(prompt, SimulatedLocal) else prompt.blocks
            if not prompt.ended:
                self.allocator.publish(blocks[at], bytes(prompt.labels[at]))
            prompt.computed += 1
            if self.stages == 1 and prompt.computed == len(prompt.labels):
                token = following(prompt.prompt) if isinstance(prompt, SimulatedLocal) else 1
                self.sampled(prompt.key, common_pb2.SampledToken(token=token, position=prompt.computed))

    def compute_window(self, prompt: SimulatedPrompt) -> bool:
        """The next block of a spread prompt, once the one before is where it is attended over. False where
        there is no room, which others have that are to go on."""
        at = prompt.computed
        if prompt.leaving is not None:
            return False
        try:
            (block,) = self.allocator.allocate(1)
        except CapacityExhausted:
            return False
        if self.loses():
            self.allocator.release([block])
            self.finish(prompt)
            prompt.sink.failed(LOST)
            return True
        prompt.blocks = [NOT_HERE] * at + [block]
        prompt.delivery.begin()
        prompt.leaving, self.content[block] = block, prompt.labels[at]
        prompt.join(at + self.draw.randrange(1, 3))
        self.pushes.append(prompt)
        self.iterate([SimulatedSpan(prompt, range(at, at + 1))])
        prompt.blocks = []
        prompt.computed += 1
        if self.stages == 1 and prompt.computed == len(prompt.labels):
            self.sampled(prompt.key, common_pb2.SampledToken(token=1, position=prompt.computed))
        return True

    def push(self) -> None:
        """A block of a spread prompt arrives from the first stage."""
        prompt = self.pushes.pop(self.draw.randrange(len(self.pushes)))
        block, label = prompt.leaving, next(iter(prompt.labels[prompt.computed - 1 :]))
        assert block is not None
        if self.content.get(block) != label:
            raise AssertionError(f"the first stage sends {self.content.get(block)} as {label}")
        self.arrived.add((0, prompt.key, label))
        prompt.leaving = None
        self.allocator.release([block])
        prompt.delivery.end()

    def iterate(self, groups: Sequence[Any]) -> bool:
        """An iteration of these, as far as the first stage goes: whether it goes on down the line. Commands
        are carried out in its midst where it has chunks of whole prompts; stages may come together anew."""
        iteration: Any = SimpleNamespace(groups=groups, timing=SimpleNamespace(own_s=0.0))
        self.group.enter(iteration)
        hidden: Any = None
        if self.group.shared is not None:
            self.group.shared(iteration, hidden)
        prompts = [group.prompt for group in groups if isinstance(group, SimulatedSpan)]
        while prompts and not prompts[0].spread and self.draw.random() < 0.3:
            self.serve()
            if self.draw.random() < 0.3:
                self.form()
        withdrawn = [isinstance(group, SimulatedSpan) and group.prompt.ended for group in groups]
        iteration.going_on = [number for number, gone in enumerate(withdrawn) if not gone]
        iteration.leaving = object() if self.stages > 1 and iteration.going_on else None
        for group in groups:
            handed_over = isinstance(group, SimulatedSpan) and isinstance(group.prompt, SimulatedPrompt)
            if handed_over and self.draw.random() < 0.5:
                group.prompt.join(group.chunk.stop + 1)
        return self.group.pass_on(iteration)

    def admit(self, prompt: SimulatedPrompt) -> None:
        if prompt.spread:
            self.waiting.remove(prompt.key)
            self.computing.append(prompt.key)
            return
        found = self.allocator.match(prompt.ids[:-1])  # the last one is always computed
        try:
            prompt.blocks = found + self.allocator.allocate(len(prompt.ids) - len(found))
        except CapacityExhausted:
            self.allocator.release(found)
            return
        prompt.device_blocks = prompt.computed = len(found)
        self.waiting.remove(prompt.key)
        self.computing.append(prompt.key)

    def generate(self) -> None:
        """An iteration of some that have their last token, as the first stage's executor has it."""
        ready = [key for key in sorted(self.generating) if self.sequences[key].started]
        keys = next_batch(ready, self.under_way, self.stages)
        if not keys or not self.group.takes_more():
            return
        rows: list[SimulatedSequence] = []
        lost: dict[int, KVCommonsError] = {}
        for one in [self.sequences[key] for key in keys]:
            if len(one.tokens) > one.blocks:
                try:
                    one.physical += self.allocator.allocate(1)
                except CapacityExhausted:
                    self.fail(one.key, Unavailable("preempted"))
                    continue
            for index in range(one.computed):
                if self.content.get(one.physical[index]) != tuple(one.tokens[: index + 1]):
                    raise AssertionError("the first stage generates over another block")
            self.content[one.physical[one.computed]] = tuple(one.tokens)
            if self.loses():
                lost[len(rows)] = LOST
                self.content[one.physical[one.computed]] = NOTHING
            rows.append(one)
        if not rows:
            return
        group = SimulatedRows(rows, lost)
        spans = self.chunks([]) if self.draw.random() < 0.5 else []
        # What is wanted of these meanwhile waits for the iteration's end.
        self.under_way |= {one.key: [] for one in rows}
        goes_on = self.iterate([group, *spans])
        self.computed(spans)
        if self.stages > 1 and goes_on:
            return
        waiting = [command for one in rows for command in self.under_way.pop(one.key, ())]
        if self.stages == 1:
            self.take(group, {one.key: following(one.tokens) for one in rows})
        elif not spans:
            raise AssertionError("a line that takes more took none")
        for command in waiting:
            command()

    def landed(self, iteration: Any, tokens: Mapping[int, common_pb2.SampledToken]) -> None:
        for group in iteration.groups:
            if isinstance(group, SimulatedSpan):
                if group.prompt.key in tokens:
                    self.sampled(group.prompt.key, tokens[group.prompt.key])
                continue
            sampled = {
                one.key: None if tokens[one.key].HasField("error") else tokens[one.key].token
                for one in group.batch.sequences
            }
            waiting = [command for key in sampled for command in self.under_way.pop(key)]
            self.take(group, sampled)
            for command in waiting:
                command()

    def loses(self) -> bool:
        """Whether a holder fails a sequence at a stage now."""
        return self.tensor == 1 and self.draw.random() < LOSSES

    def take(self, group: SimulatedRows, tokens: Mapping[int, int | None]) -> None:
        """What was sampled, as the engine takes it."""
        for row, one in enumerate(group.batch.sequences):
            token = tokens[one.key]
            if one.ended:  # with its epoch, in the iteration's midst
                continue
            if row in group.lost or token is None:
                self.fail(one.key, LOST)
            else:
                self.append(one, token)

    def scored(self, key: int, logprobs: common_pb2.PromptLogprobs) -> None:
        raise AssertionError("no simulated prompt asks for logprobs")

    def abandoned(self) -> None:
        waiting, self.under_way = self.under_way, {}
        for commands in waiting.values():
            for command in commands:
                command()

    def append(self, one: SimulatedSequence, token: int) -> None:
        """A token that was sampled; what was computed before it can be found."""
        one.computed = len(one.tokens)
        one.tokens.append(token)
        for index in range(one.computed):
            self.allocator.publish(one.physical[index], bytes(one.tokens[: index + 1]))
        if one.key in self.local:
            self.local.remove(one.key)
            self.generating.append(one.key)
        if len(one.tokens) == len(one.prompt) + one.new:
            expected = list(one.prompt)
            while len(expected) < len(one.tokens):
                expected.append(following(expected))
            if one.tokens != expected:
                raise AssertionError(f"{one.tokens} were generated, and {expected} follow")
            self.leave(one, "done")

    def fail(self, key: int, error: KVCommonsError) -> None:
        if key in self.prompts:
            if not self.prompts[key].ended:
                self.finish(self.prompts[key])
                self.prompts[key].sink.failed(error)
        elif key in self.under_way:
            self.under_way[key].append(lambda: self.fail(key, error))
        elif not self.sequences[key].ended:
            self.leave(self.sequences[key], error.message)

    def leave(self, one: SimulatedSequence, result: str) -> None:
        one.ended = True
        one.results.append(result)
        (self.local if one.key in self.local else self.generating).remove(one.key)
        self.group.leave(one.key)
        self.allocator.release(one.physical)

    def sampled(self, key: int, token: common_pb2.SampledToken) -> None:
        if key in self.sequences:
            if key in self.local:  # a report may have its last two chunks
                self.append(self.sequences[key], token.token)
            return
        prompt = self.prompts[key]
        if not prompt.ended:
            self.finish(prompt)
            first: Any = SimpleNamespace(token=token)
            prompt.sink.finished(prompt, first)  # type: ignore[arg-type]

    def fail_all(self, error: KVCommonsError) -> None:
        for key in self.generating + self.local:
            self.fail(key, error)
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
        busy = self.waiting or self.computing or self.local or self.generating or self.posted or self.pushes
        epoch = next(iter(self.stage.values())).epoch
        lines = epoch is not None and any(epoch.lines.values())
        stages = any(
            stage.inbox or stage.pushes or stage.writes or stage.held or stage.report.ByteSize()
            for stage in self.stage.values()
        )
        return not (busy or lines or stages or not self.group.formed)

    def check_end(self) -> None:
        if self.allocator.in_use:
            raise AssertionError(f"{self.allocator.in_use} blocks stay in use")
        for key, one in self.sequences.items():
            if len(one.results) != 1:
                raise AssertionError(f"sequence {key} came to {len(one.results)} ends")
        for key, prompt in self.prompts.items():
            if len(prompt.reported) != 1:
                raise AssertionError(f"prompt {key} was told {len(prompt.reported)} results")
