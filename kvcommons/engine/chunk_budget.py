"""How large an iteration's chunks are (Mnemosyne, section 4.2). Pure."""

from __future__ import annotations

from bisect import bisect_left

from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.predictor import Predictor

# Of prompts in an iteration, however late that makes the tokens beside them: so prompts end.
LEAST_TOKENS = 32
# Mean errors that an iteration is expected to stay below its objective: of 100 errors with a normal
# distribution one is larger. Beyond _ERROR_MAX an error is the doing of others who want the cores: small
# chunks are held up as well, and take longer in all.
_ERRORS = 3
_ERROR_MAX = 0.1


class ChunkBudget:
    """What one iteration takes of prompts: the largest chunks with which it keeps its objective, at the
    context that each of them ends at."""

    def __init__(
        self, predictor: Predictor, beside: IterationWork, *, objective_s: float, chunk_tokens: int
    ) -> None:
        """`beside`: what is in it anyway. `objective_s`: of the whole iteration. `chunk_tokens`: of all
        prompts together, at most."""
        self._predictor = predictor
        self._work = beside
        self._limit_s = objective_s / (1 + _ERRORS * min(predictor.error, _ERROR_MAX))
        self._bounded = objective_s < float("inf")
        self._tokens_left = chunk_tokens
        self._least = LEAST_TOKENS

    def fit(self, first: int, tokens: int) -> int:
        """How many of so many tokens of a prompt that is computed up to its position `first` are in it."""
        most = min(tokens, self._tokens_left)
        if not self._bounded:
            return most
        fitting = bisect_left(
            range(1, most + 1), True, key=lambda count: self._too_much(range(first, first + count))
        )
        return max(fitting, min(self._least, most))

    def add(self, chunk: IterationWork) -> None:
        """It is in the iteration."""
        self._work = self._work.beside(chunk)
        self._tokens_left -= int(chunk.rows)
        self._least = 0

    def _too_much(self, positions: range) -> bool:
        """Or beyond what the predictor can know: then chunks grow as it learns."""
        work = self._work.beside(IterationWork.of_chunk(positions))
        return not self._predictor.knows(work) or self._predictor.seconds(work) > self._limit_s
