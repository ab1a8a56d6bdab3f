"""How many drafts of each sequence an iteration verifies: as many as bring the most tokens a second, by what
iterations were measured to take. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.predictor import Predictor

ROWS_MAX = 32  # that an iteration has more for its drafts
# By which a second has to have more tokens with drafts than without: what is not measured (a batch composed
# anew, tokens that are told in bursts) is not for nothing.
_GAIN_MIN = 1.03
_KEPT = 0.9  # of a measurement's weight, by the next one with as many rows
_FORGOTTEN = 0.998  # of what is known of other numbers of rows, by each iteration: one is tried again
_SURPRISE = (
    2.0  # a measurement counts as at most so many times what was expected, and as at least 1 / so many
)


class RowSeconds:
    """How long an iteration of so many rows takes: the predictor's sum of what its amounts cost, times how
    far iterations with as many rows were from it. A sum does not know that matrices are not multiplied with
    two rows as with one."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._factors: dict[int, float] = {}  # by rows

    def seconds(self, work: IterationWork) -> float:
        """0 until anything was measured."""
        return self._predictor.seconds(work) * self._factors.get(int(work.rows), 1.0)

    def learn(self, work: IterationWork, seconds: float) -> None:
        """An iteration of sequences alone has taken so long."""
        expected_s, rows = self._predictor.seconds(work), int(work.rows)
        if not expected_s or seconds <= 0:
            return
        for other, factor in self._factors.items():
            self._factors[other] = 1 + (factor - 1) * _FORGOTTEN
        known = self._factors.get(rows, 1.0)
        seen = min(max(seconds / expected_s, known / _SURPRISE), known * _SURPRISE)
        self._factors[rows] = _KEPT * known + (1 - _KEPT) * seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Of one sequence: `chances` as Acceptance gives them, and the KV that each of its rows reads."""

    chances: Sequence[float]
    read_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """Of how many tokens a draft model is asked for each sequence, and how much sooner one comes then."""

    drafts: int = 0
    saved_s: float = 0.0


def draft_depth(
    chances: Sequence[float],
    read_bytes: int,
    base: IterationWork,
    times: RowSeconds,
    *,
    step_s: float,
    most: int,
    objective_s: float,
) -> Depth:
    """`chances`: of each sequence that it may be asked for, that a draft is right, wherever it stands. A row
    of each of them reads `read_bytes` together, and a draft of each takes the draft model `step_s`. `base` is
    the iteration without drafts, of these sequences and of others. Of all depths that with the most tokens a
    second, and none that takes longer than `objective_s`."""
    base_s = times.seconds(base)
    best = Depth()
    if not base_s or not chances:
        return best
    alone_s, tokens, right = base_s / base.rows, float(base.rows), [1.0] * len(chances)
    least_s = alone_s / _GAIN_MIN
    for depth in range(1, min(most, ROWS_MAX // len(chances)) + 1):
        right = [before * chance for before, chance in zip(right, chances, strict=True)]
        tokens += sum(right)
        if sum(right) * alone_s < step_s:
            break  # it saves less than it takes, and so does each one behind it
        rows = base.rows + depth * len(chances)
        work = replace(base, rows=rows, read_bytes=base.read_bytes + depth * read_bytes)
        seconds = times.seconds(work) + depth * step_s
        if seconds > objective_s > base_s:
            break
        if seconds / tokens < least_s:
            least_s = seconds / tokens
            best = Depth(drafts=depth, saved_s=alone_s - least_s)
    return best


def choose(
    candidates: Mapping[int, Candidate], base: IterationWork, times: RowSeconds, *, objective_s: float
) -> dict[int, int]:
    """How many drafts of which sequences are verified in an iteration that has `base` without them.

    Drafts are taken in the order of their chances, which is that of each sequence's own, too; of all numbers
    of them that with the most tokens a second. The iteration takes no longer than `objective_s` for them.
    It stops where not even all drafts that are left, if their rows took no time, would make up for the rows
    before them: most matches are short ones, and this is asked before each token.
    """
    ordered = sorted(
        (-chance, depth, key)
        for key, candidate in candidates.items()
        for depth, chance in enumerate(candidate.chances)
    )[:ROWS_MAX]
    base_s = times.seconds(base)
    if not ordered or not base_s:
        return {}
    work, tokens = base, float(base.rows)
    best, best_rate = 0, _GAIN_MIN * tokens / base_s
    at_most = tokens - sum(negative for negative, _, _ in ordered)
    for count, (negative, _, key) in enumerate(ordered, start=1):
        tokens -= negative
        read_bytes = work.read_bytes + candidates[key].read_bytes
        work = replace(work, rows=work.rows + 1, read_bytes=read_bytes)
        seconds = times.seconds(work)
        if seconds > objective_s > base_s or at_most <= best_rate * seconds:
            break
        if tokens > best_rate * seconds:
            best, best_rate = count, tokens / seconds
    chosen: dict[int, int] = {}
    for _, depth, key in ordered[:best]:
        chosen[key] = depth + 1
    return chosen
