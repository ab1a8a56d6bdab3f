"""Grammars compiled for a model's vocabulary, and where an answer stands in one.

A mask has a bit for each token of the vocabulary, in order, the lowest bit of a byte first: whether the token
may come next."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from kvcommons.errors import Internal, InvalidInput, Unprocessable
from kvcommons.model.tokenizer import Tokenizer

# Of the library's. What it takes for one mask is bounded by these, whatever the grammar: some tens of
# milliseconds with all but the worst.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,  # a grammar's text may be somebody's secret
)
_ERROR_CHARS = 250  # of an error's first line, and of its reason
_REASON = "error: "  # of an expression, behind the place in it


class Vocabulary:
    """A model's tokens, as the library needs them: read once, and shared by all grammars."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Seconds with a large vocabulary: never on an event loop. Raises InvalidInput for a model whose
        tokenizer names no token that ends an answer."""
        if not tokenizer.eos_ids:
            raise InvalidInput("the model's folder names no token that ends an answer (eos_token_id)")
        self.eos = min(tokenizer.eos_ids)
        self._library = LLTokenizer(TokenizerWrapper(_Tokens(tokenizer, self.eos)))

    @classmethod
    def read(cls, folder: Path) -> Vocabulary:
        """Of a model's folder."""
        return cls(Tokenizer.read(folder))

    def compile(self, text: str) -> Grammar:
        """Never on an event loop, and on a thread with a deep stack: the library recurses along the rules.
        Raises InvalidInput."""
        matcher = LLMatcher(self._library, text, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise InvalidInput(f"the grammar cannot be used: {_shown(matcher.get_error())}")
        return Grammar(matcher, self.eos)


class Grammar:
    """A compiled grammar, from which each answer's state is copied."""

    def __init__(self, matcher: LLMatcher, eos: int) -> None:
        self._matcher = matcher
        self._eos = eos

    def begin(self, stop_ids: Collection[int]) -> AnswerState:
        """Of an answer that one of these tokens ends."""
        return AnswerState(self._matcher.deep_copy(), self._eos, stop_ids)


class AnswerState:
    """Where one answer stands. Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, eos: int, stop_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._eos = eos
        self._ends = sorted({eos, *stop_ids})
        self._stop_ids = frozenset(stop_ids)

    def advance(self, tokens: Sequence[int]) -> None:
        """These come next, none of them an end. Raises Internal where the grammar does not allow them, and
        Unprocessable where the library's limits are reached."""
        if not tokens:
            return
        accepted = self._matcher.try_consume_tokens(list(tokens))
        if accepted < len(tokens):
            if self._matcher.is_error():
                raise self._too_complex()
            raise Internal(f"the answer does not keep to its grammar from its token {tokens[accepted]} on")

    def allowed(self, tokens: Sequence[int]) -> int:
        """How many of these, none of them an end, the grammar allows next; nothing advances."""
        end = next((at for at, token in enumerate(tokens) if token in self._ends), len(tokens))
        return int(self._matcher.validate_tokens(list(tokens[:end])))

    def masks_behind(self, drafts: Sequence[int]) -> Iterator[bytes]:
        """As `mask` behind each of these, if they came next, as far as that can be said. Nothing advances."""
        if not drafts:
            return
        ahead = AnswerState(self._matcher.deep_copy(), self._eos, self._stop_ids)
        with suppress(Internal, Unprocessable):
            for draft in drafts:
                ahead.advance([draft])
                yield ahead.mask()

    def mask(self) -> bytes:
        """Tokens that may come next; the answer may end where the grammar is fulfilled. Raises Unprocessable
        where the library's limits are reached."""
        mask = bytearray(self._matcher.compute_bitmask())
        if self._matcher.is_error():
            raise self._too_complex()
        accepts = self._matcher.is_accepting()
        for token in self._ends:
            at, bit = token // 8, 1 << token % 8
            mask.extend(bytes(max(0, at + 1 - len(mask))))
            if accepts and token in self._stop_ids:
                mask[at] |= bit
            else:
                mask[at] &= ~bit
        if not mask.strip(b"\0"):
            raise Unprocessable(
                "no token of the model goes on with the answer's grammar: ask for another one"
            )
        return bytes(mask)

    def _too_complex(self) -> Unprocessable:
        return Unprocessable(
            f"the answer's grammar is too complex to go on, simplify it: {_shown(self._matcher.get_error())}"
        )


class _Tokens:
    """In the form in which the library asks for a vocabulary."""

    def __init__(self, tokenizer: Tokenizer, eos: int) -> None:
        ids = range(tokenizer.vocab_size)
        self.eos_token_id = eos
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token) for token in ids]
        self.special_token_ids = [token for token in ids if tokenizer.is_control(token)]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode_text(text)


def _shown(error: str) -> str:
    """Its first line, and the reason where that stands in a later line: what else follows repeats the
    grammar. Characters that cannot be seen, as a grammar may have them, are written as escapes."""
    first, *others = error.strip().splitlines() or [""]
    reasons = [line.strip().removeprefix(_REASON) for line in others if line.strip().startswith(_REASON)]
    return " ".join(_cut("".join(map(_visible, text))) for text in (first, *reasons[:1]))


def _visible(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _cut(text: str) -> str:
    return text if len(text) <= _ERROR_CHARS else text[:_ERROR_CHARS] + "…"
