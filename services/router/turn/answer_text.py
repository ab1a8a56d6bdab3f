"""One answer's text while its tokens come: detokenized, held back for stop strings, cut at a match. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvcommons.model.detokenizer import Detokenizer
from kvcommons.model.stops import StopMatcher, StopStep
from kvcommons.model.tokenizer import Tokenizer
from kvcommons.pb import common_pb2 as pb

# A token, and where in the answer its text begins (characters).
Shown = tuple[int, pb.SampledToken]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Text that may be sent now and the tokens whose text it completes; `reason` once the answer ends."""

    text: str
    tokens: tuple[Shown, ...] = ()
    reason: str | None = None


class AnswerText:
    """`text` is what was released so far, `kept` the tokens that belong to the session: all, or those before
    a stop match."""

    def __init__(self, tokenizer: Tokenizer, *, stops: Sequence[str], stop_ids: Collection[int]) -> None:
        """`stop_ids`: tokens that end the answer; empty with ignore_eos."""
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops)
        self._stop_ids = frozenset(stop_ids)
        self._held: list[tuple[int, Shown]] = []  # where a token's text ends, the token
        self._pushed_chars = 0
        self._released_chars = 0
        self._parts: list[str] = []
        self.tokens: list[int] = []
        self.kept: list[int] = []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def push(self, token: pb.SampledToken) -> Piece:
        """The next generated token."""
        self.tokens.append(token.token)
        if token.token in self._stop_ids:
            return self._end("stop")
        added = self._detokenizer.push(token.token)
        start = self._pushed_chars
        self._pushed_chars += len(added)
        self._held.append((self._pushed_chars, (start, token)))
        step = self._matcher.push(added)
        if step.matched is not None:
            return self._cut(step)
        self.kept = self.tokens
        return self._release(step.text, None)

    def end(self, reason: str) -> Piece:
        """No more tokens come; gives what was held back."""
        return self._end(reason)

    def _end(self, reason: str) -> Piece:
        rest = self._detokenizer.finish()
        self._pushed_chars += len(rest)
        step = self._matcher.finish(rest)
        if step.matched is not None:
            return self._cut(step)
        self.kept = self.tokens
        return self._release(step.text, reason)

    def _cut(self, step: StopStep) -> Piece:
        self.kept = self.tokens[: step.kept_tokens]
        return self._release(step.text, "stop")

    def _release(self, text: str, reason: str | None) -> Piece:
        if not text and reason is None:
            return Piece(text="")
        self._parts.append(text)
        self._released_chars += len(text)
        ready = 0
        while ready < len(self._held) and self._held[ready][0] <= self._released_chars:
            ready += 1
        tokens = tuple(shown for _, shown in self._held[:ready])
        del self._held[:ready]
        return Piece(text=text, tokens=tokens, reason=reason)
