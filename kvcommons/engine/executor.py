"""How iterations are carried out: the engine's one plug point for everything but the plain way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from kvcommons.engine.batch import Batch, by_holder
from kvcommons.engine.core import Core
from kvcommons.engine.iteration import Iteration
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.prompts import PromptSpan
from kvcommons.engine.remote.attention import RemoteAttention
from kvcommons.engine.sequence import Sequence as GeneratingSequence
from kvcommons.engine.slices import Slices
from kvcommons.engine.token_rows import TokenRows
from kvcommons.pb import common_pb2 as pb


class Work(Protocol):
    """The engine, as its executor sees it. Belongs to the engine's thread."""

    def post(self, command: Callable[[], None]) -> None:
        """To be done on the engine's thread; from any thread."""

    def make_room(self) -> Mapping[int, GeneratingSequence]:
        """Makes room for a token of each sequence that generates, as far as there is any: allocates, asks
        for loans, preempts. Those that have it."""

    def drafts(self, sequences: Sequence[GeneratingSequence]) -> Mapping[int, Sequence[int]]:
        """By key, those that are worth verifying in an iteration of these sequences."""

    def spans(self, *, beside: IterationWork, objectives_s: Collection[float] = ()) -> Sequence[PromptSpan]:
        """Of prompts, for an iteration that has this of sequences that generate, which are promised a token
        within `objectives_s` (0: as the settings have it)."""

    def prompts(self) -> bool:
        """Whether any prompt is to be computed here."""

    def load(self) -> tuple[int, int]:
        """Sequences that generate, and their tokens."""

    def answer_switches(self) -> None:
        """Batches are composed of what sequences are now: blocks that were switched away are in none."""

    def cores(self, iteration: Iteration) -> AbstractContextManager[None]:
        """An iteration on the engine's thread has the host's cores, where engines share them."""

    def between_layers(self, iteration: Iteration) -> None:
        """An iteration on the engine's thread stands between two of its layers: what cannot wait for its end
        goes first."""

    def take_results(
        self,
        iteration: Iteration,
        tokens: Sequence[Sequence[pb.SampledToken]] | None,
        groups: Collection[int] | None = None,
    ) -> None:
        """An iteration has ended; without tokens where it failed as a whole. `groups`: of which it is known
        what came, by number, where others are under way still; of the whole `took` is called then."""

    def took(self, iteration: Iteration) -> None:
        """It has ended, and went well as a whole: what it took is learnt."""

    def sampled(self, key: int, token: pb.SampledToken) -> None:
        """The stage that ends the model has sampled the token that follows a prompt."""

    def scored(self, key: int, logprobs: pb.PromptLogprobs) -> None:
        """It has read these logprobs of the prompt's own tokens, before that token."""

    def idle(self) -> None:
        """There was nothing to compute."""


class Executor(Protocol):
    """Belongs to the engine's thread."""

    def check(self) -> None:
        """Raises Loading where a prompt that comes now could not be computed."""

    def advance(self, work: Work) -> bool:
        """Begins what can begin. False where nothing more can until something is posted."""

    def generate(self, work: Work) -> None:
        """An iteration of all that can generate, between two layers of one on the engine's thread in which
        none does."""

    def defer(self, key: int, command: Callable[[], None]) -> bool:
        """Whether the sequence generates in an iteration under way: the command waits for its end."""

    def changed(self) -> None:
        """Blocks of some sequence are others now."""

    def leave(self, key: int) -> None:
        """The sequence has ended, maybe while a chunk of its prompt is computed."""

    def close(self) -> None:
        """Waits for iterations under way, a bounded time."""


class Composer:
    """Makes iterations of sequences; a batch whose composition has not changed is stepped on."""

    def __init__(self, core: Core, remote: RemoteAttention, *, attend_deadline_s: float) -> None:
        """A layer waits so long for other holders."""
        self._core = core
        self._remote = remote
        self._attend_deadline_s = attend_deadline_s

    def batch(
        self,
        last: Batch | None,
        sequences: Sequence[GeneratingSequence],
        drafts: Mapping[int, Sequence[int]] | None = None,
    ) -> Batch | None:
        """Of these sequences; the `last` one goes on if it is the same. `drafts`, by key, are verified."""
        ordered = by_holder(sequences)
        if not ordered:
            return None
        if drafts:
            rows = [
                (one, drafts.get(one.key, ())[:count])
                for one in ordered
                for count in range(1 + len(drafts.get(one.key, ())))
            ]
            ordered, ahead = [one for one, _ in rows], [drafts for _, drafts in rows]
            return Batch(ordered, self._core.block_tokens, self._core.backend, ahead)
        if last is not None and not last.drafts and last.sequences == ordered:
            last.step()
            return last
        return Batch(ordered, self._core.block_tokens, self._core.backend)

    def work(self, batch: Batch | None) -> IterationWork:
        """Of an iteration of it alone."""
        return IterationWork() if batch is None else batch.work(self._core.layout.block_bytes)

    def iteration(
        self, batch: Batch | None, spans: Sequence[PromptSpan] = (), slices: Slices | None = None
    ) -> Iteration:
        rows = [] if batch is None else [self.rows(batch)]
        return Iteration(self._core, [*rows, *spans], slices)

    def rows(self, batch: Batch) -> TokenRows:
        """Of an iteration of it."""
        return TokenRows(self._core, self._remote, batch, self._attend_deadline_s)


class Inline:
    """One iteration of all that can run, on the engine's thread."""

    def __init__(self, composer: Composer) -> None:
        self._composer = composer
        self._batch: Batch | None = None
        self._iteration: Iteration | None = None  # under way
        self._deferred: list[Callable[[], None]] = []  # for after it

    def check(self) -> None:
        """It can be."""

    def advance(self, work: Work) -> bool:
        iteration = self.compose(work)
        if iteration is None:
            return False
        work.take_results(iteration, self.run(work, iteration))
        return True

    def run(self, work: Work, iteration: Iteration) -> list[list[pb.SampledToken]] | None:
        """As `Iteration.run_or_fail`, on the engine's thread."""
        self._iteration = iteration
        with work.cores(iteration):
            tokens = iteration.run_or_fail(lambda: work.between_layers(iteration))
        self._iteration = None
        deferred, self._deferred = self._deferred, []
        for command in deferred:
            work.post(command)
        return tokens

    def generate(self, work: Work) -> None:
        batch = self._compose_batch(work)
        if batch is not None:
            iteration = self._composer.iteration(batch)
            work.take_results(iteration, iteration.run_or_fail())

    def compose(self, work: Work, slices: Callable[[bool], Slices] | None = None) -> Iteration | None:
        """None where there is nothing to compute. `slices`: where they are computed, by whether queries are
        shifted."""
        batch = self._compose_batch(work)
        objectives_s = () if batch is None else batch.objectives_s
        spans = work.spans(beside=self._composer.work(batch), objectives_s=objectives_s)
        work.answer_switches()
        if batch is not None and any(span.exclusive for span in spans):
            self._batch = batch = None  # its sequences generate between the chunk's layers
        if batch is None and not spans:
            work.idle()
            return None
        has_heads = batch is not None and batch.has_heads
        return self._composer.iteration(batch, spans, slices(has_heads) if slices else None)

    def _compose_batch(self, work: Work) -> Batch | None:
        sequences = list(work.make_room().values())
        drafts = work.drafts(sequences)  # first: room for them may change the last batch's blocks
        self._batch = self._composer.batch(self._batch, sequences, drafts)
        return self._batch

    def defer(self, key: int, command: Callable[[], None]) -> bool:
        groups = [] if self._iteration is None else self._iteration.groups
        for group in groups:
            if isinstance(group, TokenRows) and any(one.key == key for one in group.batch.sequences):
                self._deferred.append(command)
                return True
        return False

    def changed(self) -> None:
        self._batch = None

    def leave(self, key: int) -> None:
        """A batch that lacks it is composed anew; a chunk of its prompt ends where it is."""
        iteration = self._iteration
        for group in [] if iteration is None else iteration.groups:
            if iteration is not None and isinstance(group, PromptSpan) and group.prompt.key == key:
                iteration.withdraw(group)

    def close(self) -> None:
        """Nothing is under way between two calls."""
