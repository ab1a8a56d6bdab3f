"""One answer's text while its tokens come: detokenized, held back for stop strings, cut at a match, and taken
apart into its parts. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvcommons.model.detokenizer import Detokenizer
from kvcommons.model.stops import StopMatcher, StopStep
from kvcommons.model.tokenizer import Tokenizer
from kvcommons.pb import common_pb2 as pb
from services.router.answer.parser import AnswerParser
from services.router.answer.parts import AnswerParts, Part, joined

# A token, and where in the answer its text begins (characters).
Shown = tuple[int, pb.SampledToken]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Parts that may be sent now and the tokens whose text was released; `reason` once the answer ends."""

    parts: tuple[Part, ...] = ()
    tokens: tuple[Shown, ...] = ()
    reason: str | None = None


class AnswerText:
    """`text` is what was released so far, `parts` what it is made of, `kept` the tokens that belong to the
    session: all, or those before a stop match."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str],
        stop_ids: Collection[int],
        min_tokens: int = 0,
        parser: AnswerParser | None = None,
        called: str = "tool_calls",
        shows_end: bool = False,
    ) -> None:
        """`shows_end`: the token that ends the answer is one of those whose text, which is none, is released.
        `stop_ids`: tokens that end the answer; empty with ignore_eos. `min_tokens`: in the text of the
        first ones stop strings are not looked for. `parser`: takes the text apart; None: all of it is
        content."""
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops, min_tokens=min_tokens)
        self._stop_ids = frozenset(stop_ids)
        self._parser = parser or AnswerParser()
        self._called = called
        self._shows_end = shows_end
        # Control tokens have no text, so they are no part of `text`; those that mark parts are handed to the
        # parser in their place. Where they stand (characters), and their names.
        self._marks: deque[tuple[int, str]] = deque()
        self._held: list[tuple[int, Shown]] = []  # where a token's text ends, the token
        self._pushed_chars = 0
        self._released_chars = 0
        self._texts: list[str] = []
        self.parts = AnswerParts()
        self.matched_stop: str | None = None  # the stop string that ended the answer
        self.reasoning_tokens = 0  # of `tokens`: those before anything else was released
        self.accepted_prediction_tokens = 0  # of `tokens`
        self.rejected_prediction_tokens = 0  # in place of which they came
        self.tokens: list[int] = []
        self.kept: list[int] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def push(self, token: pb.SampledToken) -> Piece:
        """The next generated token."""
        self.tokens.append(token.token)
        self.accepted_prediction_tokens += token.accepted_prediction
        self.rejected_prediction_tokens += token.rejected_prediction_tokens
        if token.token in self._stop_ids:
            return self._end("stop", token)
        mark = self._parser.control_marks.get(token.token)
        # Nothing that comes behind a mark finishes a character before it.
        added = self._detokenizer.push(token.token) if mark is None else self._detokenizer.finish()
        start = self._pushed_chars
        self._pushed_chars += len(added)
        if mark is not None:
            self._marks.append((self._pushed_chars, mark))
        self._held.append((self._pushed_chars, (start, token)))
        step = self._matcher.push(added)
        if step.matched is not None:
            return self._cut(step)
        self.kept = self.tokens
        return self._release(step.text, None)

    def end(self, reason: str) -> Piece:
        """No more tokens come; gives what was held back."""
        return self._end(reason, None)

    def _end(self, reason: str, token: pb.SampledToken | None) -> Piece:
        """`token`: with which it ends, where it is one that has no text."""
        rest = self._detokenizer.finish()
        self._pushed_chars += len(rest)
        if token is not None and self._shows_end:
            self._held.append((self._pushed_chars, (self._pushed_chars, token)))
        step = self._matcher.finish(rest)
        if step.matched is not None:
            return self._cut(step)
        self.kept = self.tokens
        return self._release(step.text, reason)

    def _cut(self, step: StopStep) -> Piece:
        self.kept = self.tokens[: step.kept_tokens]
        self.matched_stop = step.matched
        return self._release(step.text, "stop")

    def _release(self, text: str, reason: str | None) -> Piece:
        marked = bool(self._marks) and self._marks[0][0] <= self._released_chars + len(text)
        if not text and not marked and reason is None:
            return Piece()
        parts = self._parse(text)
        if reason is not None:
            parts += self._parser.finish(cut=reason == "length")
            reason = self._called if reason == "stop" and self._parser.calls else reason
        self.parts.add(parts)
        if self.parts.only_reasoning:
            self.reasoning_tokens = len(self.tokens)
        ready = 0
        while ready < len(self._held) and self._held[ready][0] <= self._released_chars:
            ready += 1
        tokens = tuple(shown for _, shown in self._held[:ready])
        del self._held[:ready]
        return Piece(parts=joined(parts), tokens=tokens, reason=reason)

    def _parse(self, text: str) -> list[Part]:
        """Text that is released, and the marks in it."""
        self._texts.append(text)
        parts: list[Part] = []
        while self._marks and self._marks[0][0] <= self._released_chars + len(text):
            at, name = self._marks.popleft()
            before = at - self._released_chars
            parts += self._parser.push(text[:before])
            parts += self._parser.mark(name)
            text = text[before:]
            self._released_chars = at
        self._released_chars += len(text)
        return parts + self._parser.push(text)
