"""What a request says that its answer may be, for drafts of it. Pure.

Prediction and answer are taken to begin alike, and to go on side by side: what follows in the prediction is
the draft. Where that does not fit, the answer's last tokens are looked for in all of the prediction.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvcommons.engine.drafts.history import BREAK
from kvcommons.engine.drafts.index import MATCH_MIN, DraftIndex, Match, matching
from kvcommons.pb import common_pb2 as pb

# That prediction and answer both begin counts as a match of so many tokens: who predicts knows more than a
# few equal tokens say.
_BEGINNING = [BREAK] * 8


class PredictedAnswer:
    """Of one sequence. A token of the prediction takes eight bytes."""

    def __init__(self, prediction: Sequence[int], answer: Sequence[int]) -> None:
        """`answer`: what there is of it by now."""
        self._text = array("i", [*_BEGINNING, *prediction])
        self._answer = [*_BEGINNING, *answer]
        self._index = DraftIndex(self._text)
        self._end = len(self._answer)  # in the prediction, where the answer is by now

    def extend(self, came: Sequence[int]) -> None:
        """The answer has grown by these tokens."""
        self._answer.extend(came)
        self._end += len(came)

    def drafts(self, most: int) -> tuple[int, list[int]]:
        """The length of the longest match of the answer's last tokens in the prediction, and at most so many
        tokens that follow it."""
        match = self._index.longest(self._text, self._answer)
        # The index compares with the newest places only, and a file has its commonest tokens in hundreds.
        beside = matching(self._text, self._end - 1, self._answer) if self._end <= len(self._text) else 0
        if beside >= max(match.length, MATCH_MIN):
            match = Match(end=self._end, length=beside)
        if match.length:
            self._end = match.end
        return match.length, self._text[match.end : match.end + most].tolist() if match.length else []


def mark_predicted(sampled: Sequence[pb.SampledToken], drafts: Sequence[int]) -> None:
    """Says of the tokens of a sequence's iteration which of the prediction's drafts came. `sampled`: at the
    position of each draft, and behind the last one."""
    for at, (token, draft) in enumerate(zip(sampled, drafts, strict=False)):
        if token.HasField("error"):
            return
        if token.token != draft:
            token.rejected_prediction_tokens = len(drafts) - at
            return
        token.accepted_prediction = True
