"""What answers say of the prompt itself: its text again, and how likely its tokens are. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from kvcommons.model.detokenizer import Detokenizer
from kvcommons.model.tokenizer import Tokenizer
from services.router.turn.prompt_logprobs import LogprobsOfPrompt, TokenLikelihood

Json = dict[str, Any]

# JSON has no infinity; OpenAI writes this for a token that cannot come.
LOGPROB_MIN = -9999.0
_PIECE_TOKENS = 1024  # of an event of a stream


def prompt_logprobs_body(
    tokenizer: Tokenizer, tokens: Sequence[int], read: LogprobsOfPrompt, top: int
) -> list[Json | None]:
    """In vLLM's shape: of each token but the first an object by token ids, its own and those of the `top`
    likeliest."""
    return [None if one is None else _by_token(tokenizer, one, top) for one in read.likelihoods(tokens)]


def _by_token(tokenizer: Tokenizer, one: TokenLikelihood, top: int) -> Json:
    ranked = [(one.token, one.logprob, one.rank)]
    ranked += [(token, logprob, at) for at, (token, logprob) in enumerate(one.top[:top], 1)]
    return {
        str(token): {
            "logprob": max(logprob, LOGPROB_MIN),
            "rank": rank,
            "decoded_token": tokenizer.token_text(token),
        }
        for token, logprob, rank in ranked
    }


def top_logprobs_body(
    tokenizer: Tokenizer, token: int, logprob: float, top: Sequence[tuple[int, float]]
) -> dict[str, float]:
    """In the shape of OpenAI's completions: by text, the token's own among them. Of tokens that read alike,
    as parts of a character do, the likeliest one stands."""
    named: dict[str, float] = {}
    for other, value in (*top, (token, logprob)):
        named.setdefault(tokenizer.token_text(other), max(value, LOGPROB_MIN))
    return named


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoedPrompt:
    """A prompt that stands before its answers. `read`: with its logprobs, `top` alternatives of each
    token."""

    tokenizer: Tokenizer
    tokens: Sequence[int]
    text: str
    read: LogprobsOfPrompt | None = None
    top: int = 0

    def pieces(self) -> Iterator[tuple[str, Json | None]]:
        """Its text and its logprobs in OpenAI's legacy shape, a bounded number of tokens each; joined they
        are all of both."""
        if self.read is None:
            yield self.text, None
            return
        starts, found = self._starts(), self.read.likelihoods(self.tokens)
        for first in range(0, len(self.tokens), _PIECE_TOKENS):
            last = first + _PIECE_TOKENS >= len(self.tokens)
            begin, end = starts[first], None if last else starts[first + _PIECE_TOKENS]
            tokens = self.tokens[first : first + _PIECE_TOKENS]
            likelihoods = list(islice(found, len(tokens)))
            yield (
                self.text[begin:end],
                {
                    "tokens": [self.tokenizer.token_text(token) for token in tokens],
                    "token_logprobs": [
                        None if one is None else max(one.logprob, LOGPROB_MIN) for one in likelihoods
                    ],
                    "top_logprobs": [
                        None
                        if one is None
                        else top_logprobs_body(self.tokenizer, one.token, one.logprob, one.top[: self.top])
                        for one in likelihoods
                    ],
                    "text_offset": starts[first : first + _PIECE_TOKENS],
                },
            )

    def _starts(self) -> list[int]:
        """Where each token's text begins, in characters; a control token has none."""
        detokenizer, starts, chars = Detokenizer(self.tokenizer), list[int](), 0
        for token in self.tokens:
            starts.append(min(chars, len(self.text)))
            chars += len(detokenizer.push(token))
        return starts
