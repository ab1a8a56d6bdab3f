"""How large an iteration's chunks are (Mnemosyne, section 4.2). Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol

from kvcommons.engine.iteration_costs import IterationWork

# Of prompts in an iteration, however late that makes the tokens beside them: so prompts end.
LEAST_TOKENS = 32
# Mean errors that an iteration is expected to stay below its objective: of 100 errors with a normal
# distribution one is larger. Beyond _ERROR_MAX an error is the doing of others who want the cores: small
# chunks are held up as well, and take longer in all.
_ERRORS = 3
_ERROR_MAX = 0.1


WorkOf = Callable[[range], IterationWork]
"""Of a chunk of these positions."""


class IterationTimes(Protocol):
    """What a `Predictor` says of iterations, and what laws say of those that nobody has run."""

    @property
    def error(self) -> float:
        """The mean absolute one, of what was said."""

    def seconds(self, work: IterationWork) -> float: ...

    def knows(self, work: IterationWork) -> bool:
        """Whether `seconds` can be believed."""


class ChunkBudget:
    """What one iteration takes of prompts: the largest chunks with which it keeps its objective, at the
    context that each of them ends at."""

    def __init__(
        self, times: IterationTimes, beside: IterationWork, *, objective_s: float, chunk_tokens: int
    ) -> None:
        """`beside`: what is in it anyway. `objective_s`: of the whole iteration. `chunk_tokens`: of all
        prompts together, at most."""
        self._times = times
        self._work = beside
        self._limit_s = objective_s / (1 + _ERRORS * min(times.error, _ERROR_MAX))
        self._bounded = objective_s < float("inf")
        self._tokens_left = chunk_tokens
        self._least = LEAST_TOKENS

    def fit(self, first: int, tokens: int, work_of: WorkOf = IterationWork.of_chunk) -> int:
        """How many of so many tokens of a prompt that is computed up to its position `first` are in it."""
        most = min(tokens, self._tokens_left)
        if not self._bounded:
            return most
        fitting = bisect_left(
            range(1, most + 1), True, key=lambda count: self._too_much(work_of(range(first, first + count)))
        )
        return max(fitting, min(self._least, most))

    def is_short(self, first: int, tokens: int, work_of: WorkOf = IterationWork.of_chunk) -> bool:
        """Whether so many take half of an iteration at most."""
        return self.fit(first, 2 * tokens, work_of) == 2 * tokens

    def add(self, chunk: IterationWork) -> None:
        """It is in the iteration."""
        self._work = self._work.beside(chunk)
        self._tokens_left -= int(chunk.rows)
        self._least = 0

    def _too_much(self, chunk: IterationWork) -> bool:
        """Or beyond what is known: then chunks grow as the predictor learns."""
        work = self._work.beside(chunk)
        return not self._times.knows(work) or self._times.seconds(work) > self._limit_s
