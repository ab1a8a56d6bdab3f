"""The first stage's iterations: as soon as one has left it, it computes the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from kvcommons.engine.batch import by_holder
from kvcommons.engine.core import Core
from kvcommons.engine.executor import Composer, Inline, Work
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.prompts import PromptSpan
from kvcommons.engine.token_rows import TokenRows
from kvcommons.pb import common_pb2 as pb
from kvcommons.stages.batches import SteppedBatches, next_batch
from kvcommons.stages.group import StageGroup
from kvcommons.stages.iteration import StageIteration


class Pipelined(Inline):
    """Chunks of prompts, or batches of sequences that generate: several are under way, each in another stage.
    A sequence is in one batch at a time, until the last stage has sampled its token; what is wanted of it
    meanwhile waits."""

    def __init__(self, core: Core, composer: Composer, group: StageGroup) -> None:
        super().__init__(composer)
        self._core = core
        self._group = group
        self._batches = SteppedBatches(core)
        self._waiting: dict[int, list[Callable[[], None]]] = {}  # for sequences whose tokens are under way
        self._work: Work
        group.landing = self

    def check(self) -> None:
        self._group.check()

    def advance(self, work: Work) -> bool:
        self._work = work
        if self._group.takes_more():
            return self._generate(work) or self._compute(work)
        work.idle()
        return False

    def generate(self, work: Work) -> None:
        if self._group.takes_more():
            self._generate(work)

    def landed(self, iteration: StageIteration, tokens: Mapping[int, pb.SampledToken]) -> None:
        """The last stage has sampled these tokens, by sequence. Raises ValueError where one is missing."""
        for group in iteration.groups:
            if isinstance(group, TokenRows):
                self._generated(iteration, group, tokens)
            elif isinstance(group, PromptSpan) and group.prompt.key in tokens:
                self._work.sampled(group.prompt.key, tokens[group.prompt.key])

    def scored(self, key: int, logprobs: pb.PromptLogprobs) -> None:
        """The last stage has read these logprobs of a prompt's own tokens."""
        self._work.scored(key, logprobs)

    def abandoned(self) -> None:
        """What was under way does not come back: what waited for it is done."""
        waiting, self._waiting = self._waiting, {}
        for commands in waiting.values():
            for command in commands:
                command()

    def defer(self, key: int, command: Callable[[], None]) -> bool:
        if key in self._waiting:
            self._waiting[key].append(command)
            return True
        return super().defer(key, command)

    def leave(self, key: int) -> None:
        super().leave(key)
        self._group.leave(key)

    def _compute(self, work: Work) -> bool:
        """A chunk, or several."""
        spans = work.spans(beside=IterationWork())
        if not spans:
            work.idle()
            return False
        iteration = StageIteration(self._core, spans, entered=self._group.shared)
        tokens = self.run(work, iteration)
        if tokens is None:
            self._group.failed(iteration)
        else:
            self._group.pass_on(iteration)
        work.take_results(iteration, tokens)
        return True

    def _generate(self, work: Work) -> bool:
        """A token of each sequence of the next batch. Where another stage is the last, nothing of it is known
        before that one has it: no command is carried out in its middle, and its results are taken when it has
        landed."""
        ready = work.make_room()
        keys = next_batch(list(ready), self._waiting, self._group.stages)
        if not keys:
            return False
        rows = self._composer.rows(self._batches.of(by_holder([ready[key] for key in keys])))
        iteration = StageIteration(self._core, [rows], entered=self._group.shared)
        tokens = iteration.run_or_fail()
        if tokens is None:
            self._group.failed(iteration)
        elif not iteration.failures and self._group.pass_on(iteration):
            self._waiting |= {key: [] for key in keys}
            return True
        sampled = bool(iteration.failures) or self._core.model.last
        work.take_results(iteration, tokens if sampled else None)
        return True

    def _generated(
        self, iteration: StageIteration, rows: TokenRows, tokens: Mapping[int, pb.SampledToken]
    ) -> None:
        keys = [sequence.key for sequence in rows.batch.sequences]
        if any(key not in tokens for key in keys):
            raise ValueError("an iteration came back without the token of one of its sequences")
        commands = [command for key in keys for command in self._waiting.pop(key)]
        # A token takes as long as all stages do: so what is predicted of one is.
        iteration.timing.came_back(time.monotonic() - iteration.left_s)
        self._work.take_results(iteration, [[tokens[key] for key in keys]])
        for command in commands:
            command()
