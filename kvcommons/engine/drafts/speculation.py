"""What an engine has of drafts: for each sequence that generates, the index of its own tokens and how often
drafts from it were right."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcommons.engine.drafts.acceptance import Acceptance
from kvcommons.engine.drafts.choice import Candidate, RowSeconds, choose
from kvcommons.engine.drafts.index import DraftIndex, copied
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.predictor import Predictor
from kvcommons.engine.sequence import RemoteRun
from kvcommons.engine.sequence import Sequence as Generating


class _SequenceDrafts:
    """Of one sequence."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._index = DraftIndex(tokens)
        self.acceptance = Acceptance()
        self._known = len(tokens)
        self.length = 0  # of the match
        self._drafts: list[int] = []

    def next(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Takes in what came since, and drafts at most so many tokens."""
        if len(tokens) > self._known:
            self.acceptance.learn(self.length, self._drafts, tokens[self._known :])
            self._index.extend(tokens)
            self._known = len(tokens)
        match = self._index.longest(tokens)
        self.length, self._drafts = match.length, copied(tokens, match, most) if match.length else []
        return self._drafts


class Speculation:
    """Belongs to the engine's thread."""

    def __init__(
        self, predictor: Predictor, *, max_draft_tokens: int, tbt_objective_s: float, token_bytes: int
    ) -> None:
        """At most `max_draft_tokens` of a sequence in an iteration. `tbt_objective_s`: between tokens, of a
        sequence that was promised nothing else. `token_bytes`: of a token's KV in all layers."""
        self._most = max_draft_tokens
        self._tbt_objective_s = tbt_objective_s
        self._token_bytes = token_bytes
        self._times = RowSeconds(predictor)
        self._sequences: dict[int, _SequenceDrafts] = {}

    def drafts(
        self, sequences: Sequence[Generating], grow: Callable[[Generating], None]
    ) -> dict[int, Sequence[int]]:
        """By key, for the next iteration of these sequences; none where any of them has KV elsewhere. `grow`
        gives a sequence, whose blocks have no room for its drafts, a block more, if there are enough."""
        if any(isinstance(run, RemoteRun) for one in sequences for run in one.runs):
            return {}
        found: dict[int, Sequence[int]] = {}
        candidates: dict[int, Candidate] = {}
        for one in sequences:
            known = self._sequences.get(one.key)
            if known is None:
                known = self._sequences[one.key] = _SequenceDrafts(one.tokens)
            drafts = known.next(one.tokens, self._most)
            if len(drafts) > one.room:
                grow(one)
            drafts = one.verifiable(drafts)
            if drafts:
                found[one.key] = drafts
                candidates[one.key] = Candidate(
                    chances=known.acceptance.chances(known.length, len(drafts)),
                    read_bytes=len(one.tokens) * self._token_bytes,
                )
        if not found:
            return {}
        work, objective_s = self._work(sequences), self._objective_s(sequences)
        chosen = choose(candidates, work, self._times, objective_s=objective_s)
        return {key: found[key][:count] for key, count in chosen.items()}

    def took(self, work: IterationWork, seconds: float) -> None:
        """An iteration of sequences alone."""
        self._times.learn(work, seconds)

    def leave(self, key: int) -> None:
        """The sequence has ended."""
        self._sequences.pop(key, None)

    def _work(self, sequences: Sequence[Generating]) -> IterationWork:
        """Without drafts."""
        tokens = sum(len(one.tokens) for one in sequences)
        return IterationWork(rows=len(sequences), read_bytes=tokens * self._token_bytes)

    def _objective_s(self, sequences: Sequence[Generating]) -> float:
        return min(one.request.tbt_objective_s or self._tbt_objective_s for one in sequences)
