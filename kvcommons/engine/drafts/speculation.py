"""What an engine has of drafts: for each sequence that generates, the index of its own tokens, what its
request predicts, what its tenant's answers were, and how often drafts from each were right; and a draft
model, where there is one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import takewhile

from kvcommons.engine.batch import Batch
from kvcommons.engine.drafts.acceptance import Acceptance
from kvcommons.engine.drafts.choice import Candidate, Depth, RowSeconds, choose, draft_depth
from kvcommons.engine.drafts.history import AnswerHistory
from kvcommons.engine.drafts.index import DraftIndex, copied
from kvcommons.engine.drafts.model import DraftModel
from kvcommons.engine.drafts.prediction import PredictedAnswer, mark_predicted
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.predictor import Predictor
from kvcommons.engine.sequence import RemoteRun
from kvcommons.engine.sequence import Sequence as Generating
from kvcommons.pb import common_pb2 as pb

log = logging.getLogger(__name__)

# Looking for drafts takes up to 60 µs of a sequence and token. Who was told none that pay so many times in a
# row is looked at after two tokens instead of each, then after three, at most after so many.
_VAIN_LOOKS = 8
_APART_MAX = 4
# A draft model that has to catch up with a sequence first is to save as much within so many more tokens.
_PAID_BACK_TOKENS = 128

_Drafts = tuple[Sequence[int], Sequence[float]]  # and the chance of each, with all before it
_NONE: _Drafts = ((), ())


class _Source:
    """Where drafts of a sequence are from, and how often they were right."""

    def __init__(self, find: Callable[[int], tuple[int, list[int]]]) -> None:
        """`find`: the length of the match of the sequence's last tokens, and what followed it."""
        self._find = find
        self._acceptance = Acceptance()
        self._length = 0  # of the match
        self.drafts: list[int] = []
        self.chances: list[float] = []

    def learn(self, came: Sequence[int]) -> None:
        self._acceptance.learn(self._length, self.drafts, came)

    def look(self, most: int) -> None:
        self._length, self.drafts = self._find(most)
        self.chances = self._acceptance.chances(self._length, len(self.drafts))


class _SequenceDrafts:
    """Of one sequence."""

    def __init__(self, sequence: Generating, history: AnswerHistory) -> None:
        request = sequence.request
        self._sequence, self._history = sequence, history
        self._index = DraftIndex(sequence.tokens)
        self._known = len(sequence.tokens)
        self._vain = 0  # looks in a row
        self._sources = [_Source(self._own), _Source(self._tenants)]
        self._prediction: PredictedAnswer | None = None
        if request.prediction:
            self._prediction = PredictedAnswer(request.prediction, sequence.tokens[request.prompt_tokens :])
            # First: of drafts that are as likely as others, its own are taken.
            self._sources.insert(0, _Source(self._prediction.drafts))

    @property
    def due(self) -> bool:
        """Whether to look now."""
        apart = min(1 + self._vain // _VAIN_LOOKS, _APART_MAX)
        return not self._vain or len(self._sequence.tokens) >= self._known + apart

    def looked(self, *, pays: bool) -> None:
        """Whether of the last drafts any are verified."""
        self._vain = 0 if pays else self._vain + 1

    def next(self, most: int) -> _Drafts:
        """Takes in what came since, and drafts at most so many tokens, with the chance of each: from where
        more of them are expected to come."""
        tokens = self._sequence.tokens
        if len(tokens) > self._known:
            came = tokens[self._known :]
            for source in self._sources:
                source.learn(came)
            self._index.extend(tokens)
            if self._prediction is not None:
                self._prediction.extend(came)
            self._known = len(tokens)
        for source in self._sources:
            source.look(most)
        best = max(self._sources, key=lambda source: sum(source.chances))
        return best.drafts, best.chances

    def predicted(self, drafts: Sequence[int]) -> Sequence[int]:
        """The leading ones of these drafts of the last look that the prediction has, too, wherever else they
        were found."""
        if self._prediction is None or len(self._sequence.tokens) != self._known:  # it was not looked at
            return ()
        both = zip(drafts, self._sources[0].drafts, strict=False)
        return drafts[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))]

    def ended(self) -> None:
        request = self._sequence.request
        self._history.add(request.tenant, self._sequence.tokens, request.prompt_tokens)

    def _own(self, most: int) -> tuple[int, list[int]]:
        tokens = self._sequence.tokens
        match = self._index.longest(tokens)
        return match.length, copied(tokens, match, most) if match.length else []

    def _tenants(self, most: int) -> tuple[int, list[int]]:
        return self._history.drafts(self._sequence.request.tenant, self._sequence.tokens, most)


def _expected(chance: float, most: int) -> float:
    """How many of so many drafts come, one behind the other."""
    return sum(chance**count for count in range(1, most + 1))


class Speculation:
    """Belongs to the engine's thread."""

    def __init__(
        self,
        predictor: Predictor,
        *,
        max_draft_tokens: int,
        tbt_objective_s: float,
        token_bytes: int,
        model: DraftModel | None = None,
    ) -> None:
        """At most `max_draft_tokens` of a sequence in an iteration. `tbt_objective_s`: between tokens, of a
        sequence that was promised nothing else. `token_bytes`: of a token's KV in all layers. `model` drafts
        where nothing is found."""
        self._most = max_draft_tokens
        self._tbt_objective_s = tbt_objective_s
        self._token_bytes = token_bytes
        self._times = RowSeconds(predictor)
        self._sequences: dict[int, _SequenceDrafts] = {}
        self._history = AnswerHistory()
        self._model = model

    def drafts(
        self,
        sequences: Sequence[Generating],
        grow: Callable[[Generating], None],
        cores: Callable[[], AbstractContextManager[None]],
    ) -> dict[int, Sequence[int]]:
        """By key, for the next iteration of these sequences; none where any of them has KV elsewhere. `grow`
        gives a sequence, whose blocks have no room for its drafts, a block more, if there are enough. A draft
        model computes with the host's `cores`."""
        if any(isinstance(run, RemoteRun) for one in sequences for run in one.runs):
            return {}
        looked = self._looked_up(sequences)
        drafted = self._by_model(sequences, looked, cores)
        found: dict[int, Sequence[int]] = {}
        candidates: dict[int, Candidate] = {}
        for one in sequences:
            drafts, chances = drafted.get(one.key) or looked.get(one.key) or _NONE
            if not drafts:
                continue
            if len(drafts) > one.unfilled:
                grow(one)
            if drafts := one.verifiable(drafts):
                found[one.key] = drafts
                candidates[one.key] = Candidate(
                    chances=chances[: len(drafts)],
                    read_bytes=len(one.tokens) * self._token_bytes,
                )
        chosen = self._choose(candidates, sequences) if found else {}
        for key in looked:
            self._sequences[key].looked(pays=chosen.get(key, 0) > 0 and key not in drafted)
        return {key: found[key][:count] for key, count in chosen.items()}

    def _looked_up(self, sequences: Sequence[Generating]) -> dict[int, _Drafts]:
        """By key, of those that are looked at now."""
        looked: dict[int, _Drafts] = {}
        for one in sequences:
            known = self._sequences.get(one.key)
            if known is None:
                known = self._sequences[one.key] = _SequenceDrafts(one, self._history)
            if known.due:
                looked[one.key] = known.next(self._most)
        return looked

    def _by_model(
        self,
        sequences: Sequence[Generating],
        looked: Mapping[int, _Drafts],
        cores: Callable[[], AbstractContextManager[None]],
    ) -> dict[int, _Drafts]:
        """By key, of sequences of which the draft model is expected to know more than was found."""
        if self._model is None:
            return {}
        model, chances = self._model, dict[int, float]()
        for one in sequences:
            chance = model.chance(one)
            found = sum(looked[one.key][1]) if one.key in looked else 0.0
            ends = len(one.tokens) + 1 >= one.request.max_position
            if not ends and _expected(chance, self._most) > found:
                chances[one.key] = chance
        asked = [one for one in sequences if one.key in chances]
        objective_s, work = self._objective_s(sequences), self._work(sequences)
        step_s = model.step_seconds(asked)
        depth = draft_depth(
            list(chances.values()),
            sum(len(one.tokens) for one in asked) * self._token_bytes,
            work,
            self._times,
            step_s=step_s,
            most=self._most,
            objective_s=objective_s,
        )
        if not depth.drafts:
            model.rest(asked)
            return {}
        followed = [one for one in asked if model.follow(one)]
        ready = [one for one in followed if model.ready(one)]
        behind = self._behind(model, followed, depth)
        if not ready and behind is None:
            return {}
        drafts: Mapping[int, Sequence[int]] = {}
        try:
            with cores():
                if behind is not None:
                    expected_s = self._times.seconds(work) + depth.drafts * step_s
                    model.catch_up(behind, max(objective_s - expected_s, 0.0))
                if ready:
                    drafts = model.draft(ready, depth.drafts)
        except Exception:
            log.exception("a draft model failed: there are no drafts of it for these sequences any more")
            for one in followed:
                model.give_up(one.key)
        return {
            key: (some, [chances[key] ** count for count in range(1, len(some) + 1)])
            for key, some in drafts.items()
        }

    def _behind(self, model: DraftModel, sequences: Sequence[Generating], depth: Depth) -> Generating | None:
        """With which one the model is to catch up next: one at a time, for others wait meanwhile, and one for
        which that pays."""
        for one in sequences:
            left = min(one.request.max_position - len(one.tokens), _PAID_BACK_TOKENS)
            pays = model.lags(one) and model.catch_up_seconds(one) < left * depth.saved_s
            if pays and model.has_room(one):
                return one
        return None

    def _choose(
        self, candidates: Mapping[int, Candidate], sequences: Sequence[Generating]
    ) -> Mapping[int, int]:
        work, objective_s = self._work(sequences), self._objective_s(sequences)
        return choose(candidates, work, self._times, objective_s=objective_s)

    def mark(self, batch: Batch, tokens: Sequence[pb.SampledToken]) -> None:
        """Says of an iteration's tokens, by row, which were predicted, before anybody is told of them."""
        for row in batch.last_rows() if batch.drafts else ():
            drafts = batch.drafts[row]
            known = self._sequences.get(batch.sequences[row].key)
            if known is not None:
                mark_predicted(tokens[row - len(drafts) : row + 1], known.predicted(drafts))

    def took(self, work: IterationWork, seconds: float) -> None:
        """An iteration of sequences alone."""
        self._times.learn(work, seconds)

    def leave(self, key: int) -> None:
        """The sequence has ended."""
        known = self._sequences.pop(key, None)
        if known is not None:
            known.ended()
        if self._model is not None:
            self._model.leave(key)

    def _work(self, sequences: Sequence[Generating]) -> IterationWork:
        """Without drafts."""
        tokens = sum(len(one.tokens) for one in sequences)
        return IterationWork(rows=len(sequences), read_bytes=tokens * self._token_bytes)

    def _objective_s(self, sequences: Sequence[Generating]) -> float:
        return min(one.request.tbt_objective_s or self._tbt_objective_s for one in sequences)
