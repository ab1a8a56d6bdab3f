"""One iteration: rows of any number of sequences go through the model together, and each attends over its own
KV between two slices.

The unit of work is a span: positions of one sequence. A running sequence's span is its last token; a prompt's
is a chunk of it. Spans of one token are attended for together (`TokenRows`), each longer one by itself
(`PromptSpan`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import reduce
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from kvcommons.backend.interface import PagedRows
from kvcommons.engine.core import Core
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.slices import LocalSlices, Slices
from kvcommons.model.prompt_logprobs import LogprobsOfChunk, WantedLogprobs
from kvcommons.model.sampling import SamplingRow
from kvcommons.model.slices import State
from kvcommons.pb import common_pb2 as pb

log = logging.getLogger(__name__)

# Layers that go in one call on the host: commands, and time for what others compute here, wait for so many.
STRETCH = 4


class Rows(Protocol):
    """Rows of an iteration that attend together."""

    @property
    def tokens(self) -> Tensor:
        """LongTensor [rows], in host memory."""

    @property
    def positions(self) -> Tensor:
        """LongTensor [rows], in host memory: for which they are rotated."""

    @property
    def work(self) -> IterationWork:
        """Of these rows alone."""

    def open(self, timing: IterationTiming) -> None:
        """The iteration begins; what it takes is added to `timing`."""

    def attend(self, layer: int, state: State, *, needed: bool) -> Tensor | None:
        """Stores the rows' K and V of a layer, and attends over all that they see: [rows, query_heads,
        head_dim] float32. None, maybe, where it is not `needed`."""

    def paged(self) -> PagedRows | None:
        """These rows, while they are open, where they attend over blocks here alone, and their layers may go
        without being asked; else None."""

    def passed(self, layers: range) -> None:
        """These went without being asked: the rows' K and V of them are stored."""

    def sampling(self) -> list[SamplingRow]:
        """For the rows at the end after which a token is sampled."""

    def wanted_logprobs(self) -> WantedLogprobs | None:
        """Of the tokens that follow its leading rows, where a prompt's are asked for."""

    def close(self) -> None:
        """The iteration has ended, whether it went well or not. Called where `open` succeeded."""


class Withdrawn(Exception):
    """Why a group has no tokens: its sequence has ended while it was computed."""


class _Alone(AbstractContextManager[None]):
    """What fails within it is this group's failure alone."""

    def __init__(self, failures: dict[int, Exception], number: int) -> None:
        self._failures = failures
        self._number = number

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._failures.setdefault(self._number, error)
        return True


class Iteration:
    """Use once. What fails for some rows ends theirs alone (`failures`)."""

    def __init__(self, core: Core, groups: Sequence[Rows], slices: Slices | None = None) -> None:
        """`slices`: where they are computed; None: here, and no other batch waits for the model."""
        self._core = core
        self.groups = groups
        self._slices = slices or LocalSlices(core.model)
        self._paged: PagedRows | None = None
        self._ends = list(accumulate(len(group.tokens) for group in groups))
        self.rows = self._ends[-1]
        self.failures: dict[int, Exception] = {}  # by the group's number
        self.prompt_logprobs: dict[int, list[pb.PromptLogprobs]] = {}  # likewise, where they are wanted
        self.timing = IterationTiming()
        self._between_layers: Callable[[], None] | None = None

    @property
    def work(self) -> IterationWork:
        return reduce(IterationWork.beside, (group.work for group in self.groups))

    def run(self, between_layers: Callable[[], None] | None = None) -> list[list[pb.SampledToken]]:
        """The tokens sampled for each group; none for one that goes on, or failed before. `between_layers` is
        called between two layers, or two calls of several layers each, and after each slice of a prompt's
        logits."""
        began_s, self._between_layers = time.monotonic(), between_layers
        try:
            with ExitStack() as opened:
                for number, group in enumerate(self.groups):
                    with self._alone(number):
                        group.open(self.timing)
                        opened.callback(group.close)
                if len(self.groups) == 1 and not self.failures:
                    with self._alone(0):
                        self._paged = self.groups[0].paged()
                tokens = self._run()
                # Chunks that sample nothing have been given to the device by now, and not more: what they
                # took is what it takes to do them.
                self._core.backend.device.record().wait()
        finally:
            self.timing.seconds = time.monotonic() - began_s
        return tokens

    def withdraw(self, group: Rows) -> None:
        """Nothing more is stored or sampled for its rows. To be called between two layers; the iteration ends
        once it has no group left."""
        self.failures.setdefault(self.groups.index(group), Withdrawn())

    def run_or_fail(
        self, between_layers: Callable[[], None] | None = None
    ) -> list[list[pb.SampledToken]] | None:
        """As `run`; None, and a line in the log, where it fails as a whole."""
        try:
            return self.run(between_layers)
        except Exception:
            log.exception("an iteration failed", extra={"rows": self.rows})
            return None

    def _run(self) -> list[list[pb.SampledToken]]:
        timing, slices = self.timing, self._slices
        state = self._begin(
            self._core.backend.device.upload(_joined([group.positions for group in self.groups]))
        )
        layers = self._core.layers[:-1]
        # Another device is given all of them before it has done the first.
        stretch = STRETCH if self._core.backend.device.host else len(layers)
        while layers:
            if (forward := self._forward(layers[:stretch], state)) is not None:
                state, layers = forward, layers[stretch:]
            else:
                attention = self._attend(layers[0], state)
                if attention is None:
                    return [[] for _ in self.groups]
                state, layers = slices.advance(timing, layers[0], state, attention), layers[1:]
            self._pause()
        return self._finish(state)

    def _forward(self, layers: range, state: State) -> State | None:
        """Through all of these layers at once, where their rows need nobody between them."""
        if self._paged is None or self.failures:
            return None
        forward = self._slices.forward(self.timing, layers, state, self._paged)
        if forward is None:
            self._paged = None
            return None
        with self._alone(0):
            self.groups[0].passed(layers)
        return forward

    def _pause(self) -> None:
        if self._between_layers is not None:
            began_s = time.monotonic()
            self._between_layers()
            self.timing.between_layers_s += time.monotonic() - began_s

    def _begin(self, positions: Tensor) -> State:
        """positions [rows] -> q, k, v of the first layer that is computed here."""
        tokens = self._core.backend.device.upload(_joined([group.tokens for group in self.groups]))
        return self._slices.begin(self.timing, tokens, positions)

    def _attend(self, layer: int, state: State) -> Tensor | None:
        """Of all rows; None once all groups have failed."""
        parts = [self._attend_group(number, layer, state, needed=True) for number in range(len(self.groups))]
        if len(self.failures) == len(self.groups):
            return None
        return _joined([self._nothing(number) if part is None else part for number, part in enumerate(parts)])

    def _finish(self, state: State) -> list[list[pb.SampledToken]]:
        """The last layer, of the rows that it matters for, and a token after each of these."""
        sampling: list[list[SamplingRow]] = [[] for _ in self.groups]
        hidden, attention, rows = [], [], []
        closed: dict[int, Tensor] = {}  # of groups whose prompt's log-probabilities are wanted
        for number, group in enumerate(self.groups):
            wanted = None
            with self._alone(number):
                sampling[number], wanted = group.sampling(), group.wanted_logprobs()
            some = sampling[number]
            needed = bool(some) or wanted is not None
            part = self._attend_group(number, self._core.layers[-1], state, needed=needed)
            if part is not None and wanted is not None:
                leading = slice(len(wanted.tokens))
                of_group = self._of(state, number).rows(leading)
                closed[number] = self._slices.close(self.timing, of_group, part[leading])
            if part is None or not some:
                sampling[number] = []
                continue
            hidden.append(self._of(state, number).hidden[-len(some) :])
            attention.append(part[-len(some) :])
            rows += some
        drawn: list[pb.SampledToken] = []
        if rows:
            drawn = self._slices.end(self.timing, state.ending(_joined(hidden)), _joined(attention), rows)
        self._agree()
        for number, ending in closed.items():  # last: other ranks wait for all that is summed up
            with self._alone(number):
                self._read_logprobs(number, ending)
        ends = list(accumulate(len(some) for some in sampling))
        return [drawn[end - len(some) : end] for some, end in zip(sampling, ends, strict=True)]

    def _agree(self) -> None:
        """All layers are computed: several ranks agree on which chunks are right."""

    def _read_logprobs(self, number: int, closed: Tensor) -> None:
        """A slice of the rows at a time: the logits of a chunk would not fit."""
        wanted = self.groups[number].wanted_logprobs()
        assert wanted is not None
        collected = LogprobsOfChunk(wanted)
        for rows in wanted.slices(self._core.info.vocab_size):
            if number in self.failures:
                return
            logits = self._slices.head(self.timing, closed[rows])
            collected.add(rows, logits, self._core.backend.device)
            self._pause()
        self.prompt_logprobs[number] = collected.messages

    def _attend_group(self, number: int, layer: int, state: State, *, needed: bool) -> Tensor | None:
        if number not in self.failures:
            with self._alone(number):
                return self.groups[number].attend(layer, self._of(state, number), needed=needed)
        return None

    def _alone(self, number: int) -> _Alone:
        return _Alone(self.failures, number)

    def _of(self, state: State, number: int) -> State:
        """A group's rows of it."""
        if len(self.groups) == 1:
            return state
        return state.rows(slice(self._ends[number] - len(self.groups[number].tokens), self._ends[number]))

    def _nothing(self, number: int) -> Tensor:
        """In place of the attention of a group that has failed."""
        layout, rows = self._core.layout, len(self.groups[number].tokens)
        nothing = torch.zeros((rows, layout.query_heads, layout.head_dim))
        return self._core.backend.device.upload(nothing)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
