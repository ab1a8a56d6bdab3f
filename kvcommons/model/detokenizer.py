"""Token ids to text while they stream: never half a character."""

from __future__ import annotations

from kvcommons.model.tokenizer import Tokenizer

# A character has at most four bytes, so more held tokens than this are no unfinished character.
_HELD_TOKENS_MAX = 8
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """One answer's text: what `push` and `finish` give, joined, is `Tokenizer.decode` of all its tokens.

    State follows from the tokens: after a resumption push the same ids again.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Text of a token can depend on its neighbours (spaces, bytes of one character), so `held` is decoded
        # behind the tokens that were emitted last, and what those give alone is taken off.
        self._context: list[int] = []
        self._context_text = ""
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that became certain with this token; may be empty."""
        if not self._tokenizer.has_text(token):
            return ""
        self._held.append(token)
        text = self._tokenizer.decode([*self._context, *self._held])
        unfinished = text.endswith(_REPLACEMENT) or not text.startswith(self._context_text)
        if unfinished and len(self._held) < _HELD_TOKENS_MAX:
            return ""
        return self._emit(text)

    def finish(self) -> str:
        """What was held back (an unfinished character becomes U+FFFD)."""
        return self._emit(self._tokenizer.decode([*self._context, *self._held])) if self._held else ""

    def _emit(self, text: str) -> str:
        new = text[len(self._context_text) :]
        if new:
            self._context, self._held = self._held, []
            self._context_text = self._tokenizer.decode(self._context)
        return new
