"""Stop strings in streamed text."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StopStep:
    """`text` may be sent now.

    `matched`: the stop string, once one came; then the first `kept_tokens` of the tokens pushed lie wholly
    before it (a token that is partly before it is cut).
    """

    text: str
    matched: str | None = None
    kept_tokens: int = 0


class StopMatcher:
    """Holds back text that may begin a stop string. State follows from what was pushed: push it again."""

    def __init__(self, stops: Sequence[str], *, min_tokens: int = 0) -> None:
        """`min_tokens`: the text of the first ones is sent as it is."""
        self._min_tokens = min_tokens
        self._stops = [stop for stop in stops if stop]
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._sent = 0
        self._tokens = 0
        # Of tokens that brought text: where it ends, and how many tokens there were by then. Tokens
        # without text are parts of a character that a later token finishes, and go with that one.
        self._ends: list[int] = []
        self._counts: list[int] = []

    def push(self, text: str) -> StopStep:
        """`text` is what one token added (`Detokenizer.push`), empty included: call it once a token."""
        self._tokens += 1
        self._held += text
        if text:
            self._ends.append(self._sent + len(self._held))
            self._counts.append(self._tokens)
        if self._tokens <= self._min_tokens:
            return self._send(len(self._held))
        return self._match() or self._send(len(self._held) - self._undecided())

    def finish(self, text: str = "") -> StopStep:
        """The end of the answer: `text` is `Detokenizer.finish()`; gives all that was held back."""
        self._held += text
        return self._match() or self._send(len(self._held))

    def _match(self) -> StopStep | None:
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if not found:
            return None
        at, stop = min(found, key=lambda match: match[0])
        before = bisect_right(self._ends, self._sent + at)
        return StopStep(
            text=self._send(at).text, matched=stop, kept_tokens=self._counts[before - 1] if before else 0
        )

    def _send(self, length: int) -> StopStep:
        text, self._held = self._held[:length], self._held[length:]
        self._sent += length
        return StopStep(text=text)

    def _undecided(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        for length in range(min(len(self._held), self._longest - 1), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
