"""The first stage's iterations: as soon as one has left it, it computes the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from kvcommons.engine.batch import by_holder
from kvcommons.engine.core import Core
from kvcommons.engine.cores import DOZING_S
from kvcommons.engine.executor import Composer, Inline, Work
from kvcommons.engine.iteration import Rows
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.prompts import PromptSpan
from kvcommons.engine.sequence import Sequence as GeneratingSequence
from kvcommons.engine.token_rows import TokenRows
from kvcommons.pb import common_pb2 as pb
from kvcommons.stages.batches import SteppedBatches, next_batch
from kvcommons.stages.group import StageGroup
from kvcommons.stages.iteration import StageIteration


class Pipelined(Inline):
    """Iterations of a batch of sequences that generate, of chunks of prompts, or of both: several are under
    way, each in another stage. A sequence is in one batch at a time, until the last stage has sampled its
    token; what is wanted of it meanwhile waits. A prompt's next chunk enters as soon as the last one has left
    the first stage."""

    def __init__(self, core: Core, composer: Composer, group: StageGroup) -> None:
        super().__init__(composer)
        self._core = core
        self._group = group
        self._batches = SteppedBatches(core)
        self._waiting: dict[int, list[Callable[[], None]]] = {}  # for sequences whose tokens are under way
        self._beside = IterationWork()  # of the last batch
        self._work: Work
        group.landing = self

    def check(self) -> None:
        self._group.check()

    def advance(self, work: Work) -> bool:
        self._work = work
        if self._group.takes_more():
            return self._compute(work)
        work.idle()
        return False

    def generate(self, work: Work) -> None:
        """Not among ranks: those beside this one are in the midst of the chunk, too."""
        if self._group.shared is None and self._group.takes_more():
            rows = self._next_batch(list(work.make_room().values()))
            if rows is not None:
                self._carry_out(work, [rows])

    def landed(self, iteration: StageIteration, tokens: Mapping[int, pb.SampledToken]) -> None:
        """The last stage has sampled these tokens, by sequence. Raises ValueError where one is missing."""
        # It took as long as all stages did: so what is predicted of it is.
        iteration.timing.came_back(time.monotonic() - iteration.left_s)
        self._work.took(iteration)
        for number in iteration.going_on:
            group = iteration.groups[number]
            if isinstance(group, TokenRows):
                self._generated(iteration, number, group, tokens)
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
        """A token of each sequence of the next batch, and chunks beside them; chunks that have to be alone
        come after it. One that enters while all sequences are under way is as long as it may be beside
        tokens: those will be behind it."""
        generating = list(work.make_room().values())
        rows = self._next_batch(generating)
        spans = work.spans(
            beside=self._beside if generating else IterationWork(),
            objectives_s={one.request.tbt_objective_s for one in generating},
        )
        if rows is not None and any(span.exclusive for span in spans):
            self._carry_out(work, [rows])
            rows = None
        groups: list[Rows] = [*([] if rows is None else [rows]), *spans]
        if groups:
            self._carry_out(work, groups)
        else:
            work.idle()
        return bool(groups)

    def _next_batch(self, generating: Sequence[GeneratingSequence]) -> TokenRows | None:
        """None while the tokens of all that generate are under way."""
        by_key = {one.key: one for one in generating}
        keys = next_batch(list(by_key), self._waiting, self._group.stages)
        if not keys:
            return None
        batch = self._batches.of(by_holder([by_key[key] for key in keys]))
        self._beside = self._composer.work(batch)
        return self._composer.rows(batch)

    def _carry_out(self, work: Work, groups: Sequence[Rows]) -> None:
        """As far as the first stage goes. What comes of chunks is known then; of tokens, where another stage
        is the last, when the iteration has landed. No command is carried out in the midst of one of tokens
        alone."""
        iteration = StageIteration(self._core, groups, entered=self._group.shared)
        self._group.enter(iteration)
        chunks = any(isinstance(group, PromptSpan) for group in groups)
        self._core.backend.device.keep_awake(DOZING_S)  # the stages of a host have its cores between them
        tokens = self.run(work, iteration) if chunks else iteration.run_or_fail()
        if tokens is None:
            self._group.failed(iteration)
            work.take_results(iteration, None)
            return
        last = self._core.model.last
        away = [
            number
            for number, group in enumerate(groups)
            if isinstance(group, TokenRows) and number not in iteration.failures and not last
        ]
        # Where it does not go on the epoch is over: what ends these sequences waits for this iteration.
        if self._group.pass_on(iteration):
            self._waiting |= {key: [] for number in away for key in _keys(groups[number])}
        if last:
            work.took(iteration)
        known = [number for number in range(len(groups)) if number not in away]
        work.take_results(iteration, tokens, groups=known)

    def _generated(
        self, iteration: StageIteration, number: int, rows: TokenRows, tokens: Mapping[int, pb.SampledToken]
    ) -> None:
        keys = _keys(rows)
        if any(key not in tokens for key in keys):
            raise ValueError("an iteration came back without the token of one of its sequences")
        commands = [command for key in keys for command in self._waiting.pop(key)]
        sampled: list[list[pb.SampledToken]] = [[] for _ in iteration.groups]
        sampled[number] = [tokens[key] for key in keys]
        self._work.take_results(iteration, sampled, groups=[number])
        for command in commands:
            command()


def _keys(rows: Rows) -> list[int]:
    assert isinstance(rows, TokenRows)
    return [sequence.key for sequence in rows.batch.sequences]
