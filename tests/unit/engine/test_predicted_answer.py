"""Drafts of what a request predicts: from its beginning on, and behind what came otherwise."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from kvcommons.backend.choice import choose
from kvcommons.engine.batch import Batch
from kvcommons.engine.drafts import speculation
from kvcommons.engine.drafts.choice import Candidate
from kvcommons.engine.drafts.prediction import PredictedAnswer, mark_predicted
from kvcommons.engine.drafts.speculation import Speculation
from kvcommons.engine.predictor import Predictor
from kvcommons.engine.request import Request
from kvcommons.engine.sequence import LocalRun, Sequence
from kvcommons.model.sampling import SamplingParams
from kvcommons.pb import common_pb2 as pb
from kvcommons.rblock.identity import IdentityChain

PROMPT = [1, 2, 3, 4]
PREDICTION = [*range(100, 140)]
BLOCK = 64


def drafts(answer: list[int], most: int = 4, prediction: list[int] = PREDICTION) -> list[int]:
    found = PredictedAnswer(prediction, answer).drafts(most)[1]
    grown = PredictedAnswer(prediction, [])
    for token in answer:
        grown.extend([token])
    assert grown.drafts(most)[1] == found, "however the answer came"
    return found


def test_the_beginning_is_drafted_before_anything_came() -> None:
    assert drafts([]) == [100, 101, 102, 103]
    assert drafts([100]) == [101, 102, 103, 104]
    assert drafts([100], prediction=[100, 100, 100, 7]) == [100, 100, 7], "though it repeats itself"
    assert drafts([], prediction=[5]) == [5]


def test_what_follows_is_drafted_as_long_as_they_are_the_same() -> None:
    for came in range(30):
        assert drafts(PREDICTION[:came]) == PREDICTION[came : came + 4]


def test_behind_a_difference_it_goes_on_where_the_last_tokens_are() -> None:
    assert drafts([100, 101, 7]) == [], "which is not known yet"
    assert drafts([100, 101, 7, 103]) == []
    assert drafts([100, 101, 7, 103, 104]) == [105, 106, 107, 108], "a token was replaced"
    assert drafts([100, 101, 110, 111]) == [112, 113, 114, 115], "some were left out"
    assert drafts([100, 101, 7, 8, 9, 102, 103]) == [104, 105, 106, 107], "some were put in"
    twice = [1, 2, 3, 4, 9, 2, 3, 5]
    assert drafts([7, 1, 2, 3], prediction=twice) == [4, 9, 2, 3], "the longest match"
    assert drafts([7, 9, 2, 3], prediction=twice) == [5]


def test_what_comes_again_and_again_is_drafted_where_the_answer_is() -> None:
    """A token that was replaced included, as a name that is another one throughout a file."""
    lines = [[7, 8, line] for line in range(100, 200)]
    prediction = [token for line in lines for token in line]
    for replaced in (None, 31):
        answer = [token if at != replaced else 9 for at, token in enumerate(prediction)]
        predicted = PredictedAnswer(prediction, [])
        for came in range(len(answer)):
            if replaced is None or not 0 < came - replaced <= 2:
                assert predicted.drafts(3)[1] == prediction[came : came + 3]
            predicted.extend(answer[came : came + 1])
    moved = PredictedAnswer(prediction, prediction[:60])
    moved.extend(prediction[:6])
    assert moved.drafts(3)[1] == prediction[6:9], "the longer match counts"
    moved.extend(prediction[6:8])
    assert moved.drafts(3)[1] == prediction[8:11], "from which it goes on"


def test_a_wrong_prediction_drafts_nothing() -> None:
    assert drafts([7]) == []
    assert drafts([7, 8, 9, 10]) == []


def test_it_ends_where_the_prediction_does() -> None:
    assert drafts(PREDICTION[:38]) == [138, 139]
    assert drafts(PREDICTION) == []
    assert drafts([*PREDICTION, 7]) == []


def test_that_both_begin_counts_as_a_long_match() -> None:
    assert PredictedAnswer(PREDICTION, []).drafts(1)[0] == 8
    assert PredictedAnswer(PREDICTION, [100]).drafts(1)[0] == 9
    assert PredictedAnswer(PREDICTION, [7, 110, 111]).drafts(1)[0] == 2


def marks(sampled: list[int | None], predicted: list[int]) -> list[tuple[bool, int]]:
    """Of each token, None for an error: whether it was accepted, and how many were rejected for it."""
    tokens = [
        pb.SampledToken(error=pb.ErrorDetail(code="c")) if one is None else pb.SampledToken(token=one)
        for one in sampled
    ]
    mark_predicted(tokens, predicted)
    return [(token.accepted_prediction, token.rejected_prediction_tokens) for token in tokens]


def test_tokens_say_what_was_predicted() -> None:
    """Behind the first difference nothing is told to anybody."""
    assert marks([1, 2, 3, 9], [1, 2, 3]) == [(True, 0), (True, 0), (True, 0), (False, 0)]
    assert marks([1, 7, 3, 9], [1, 2, 3]) == [(True, 0), (False, 2), (False, 0), (False, 0)]
    assert marks([7, 2, 3, 9], [1, 2, 3]) == [(False, 3), (False, 0), (False, 0), (False, 0)]
    assert marks([1, 2, 3, 9], [1]) == [(True, 0), (False, 0), (False, 0), (False, 0)]
    assert marks([1, None, 3], [1, 2]) == [(True, 0), (False, 0), (False, 0)]
    assert marks([0], []) == [(False, 0)]


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> Speculation:
    """All drafts are verified, four of a sequence."""

    def all_of(candidates: dict[int, Candidate], *_: object, **__: object) -> dict[int, int]:
        return {key: len(one.chances) for key, one in candidates.items()}

    monkeypatch.setattr(speculation, "choose", all_of)
    return Speculation(Predictor(), max_draft_tokens=4, tbt_objective_s=1.0, token_bytes=1)


def generating(key: int, answer: list[int], prediction: list[int], prompt: list[int] = PROMPT) -> Sequence:
    """The last token of `answer` is this attempt's first; those before came in an earlier one."""
    request = Request(
        request_id="r", session_id="", tenant="t", salt=bytes(32), tokens=(*prompt, *answer[:-1]),
        prompt_tokens=len(prompt), max_position=200, sampling=SamplingParams(), store_control="",
        store_data="", matched_blocks=0, no_reuse=False, prediction=tuple(prediction),
    )  # fmt: skip
    made = Sequence(
        key=key, request=request, block_tokens=BLOCK, chain=IdentityChain(bytes(32), bytes(32), BLOCK)
    )
    made.append_run(LocalRun(first_block=0, blocks=[key]))
    made.start(answer[-1])
    return made


def found(drafting: Speculation, *sequences: Sequence) -> dict[int, list[int]]:
    return {key: list(some) for key, some in drafting.drafts(sequences, lambda _: None, nullcontext).items()}


def test_a_resumed_answer_goes_on_behind_what_came_of_it(drafting: Speculation) -> None:
    one, other = generating(1, [100], PREDICTION), generating(2, [100, 101, 7, 103, 104], PREDICTION)
    plain = generating(3, [100], [])
    assert found(drafting, one, other, plain) == {1: [101, 102, 103, 104], 2: [105, 106, 107, 108]}
    one.append(101)
    one.append(102)
    other.append(9)
    assert found(drafting, one, other, plain) == {1: [103, 104, 105, 106]}


def test_tokens_of_an_iteration_say_whose_prediction_they_were(drafting: Speculation) -> None:
    """Of a sequence whose prompt has the same text as well; what only the prompt foretold is not counted."""
    repeats = [*PROMPT, *PREDICTION, 3, 4]
    one = generating(1, [100, 101, 102], PREDICTION, prompt=repeats)
    two = generating(2, [100, 101, 102], [], prompt=repeats)
    three = generating(3, [100], [100, 101, 50, 51])
    sequences = [one, two, three]
    drafts = found(drafting, *sequences)
    assert drafts == {1: [103, 104, 105, 106], 2: [103, 104, 105, 106], 3: [101, 50, 51]}
    rows = [(of, drafts[of.key][:count]) for of in sequences for count in range(1 + len(drafts[of.key]))]
    batch = Batch([of for of, _ in rows], BLOCK, choose(), [ahead for _, ahead in rows])
    came = [103, 104, 105, 106, 107] * 2 + [101, 102, 51, 52]
    tokens = [pb.SampledToken(token=token) for token in came]
    drafting.mark(batch, tokens)
    assert [token.accepted_prediction for token in tokens] == [
        True, True, True, True, False,
        False, False, False, False, False,
        True, False, False, False,
    ]  # fmt: skip
    assert [at for at, token in enumerate(tokens) if token.rejected_prediction_tokens] == [11]
    assert tokens[11].rejected_prediction_tokens == 2
    drafting.mark(Batch(sequences, BLOCK, choose()), tokens[:3])


def test_who_is_told_nothing_that_pays_is_looked_at_more_rarely(drafting: Speculation) -> None:
    """Until something pays: then each token counts again."""
    one = generating(1, [1000], [], prompt=[*PREDICTION, *range(200, 260)])
    one.append_run(LocalRun(first_block=1, blocks=[*range(2, 2 + 199 // BLOCK)]))
    looks = []
    known = one.tokens[-1]
    for _ in range(60):
        before = drafting._sequences[1]._known if 1 in drafting._sequences else 0
        assert found(drafting, one) == {}
        looks.append(drafting._sequences[1]._known != before)
        known += 1
        one.append(known)
    assert all(looks[:8])
    assert 60 / 4 < sum(looks) < 30
    one.append(100)
    drafts = []
    for token in range(101, 108):
        one.append(token)
        drafts.append(found(drafting, one).get(1))
    first = next(at for at, some in enumerate(drafts) if some)
    assert first < 4
    assert drafts[first:] == [[*range(at, at + 4)] for at in range(102 + first, 109)]
