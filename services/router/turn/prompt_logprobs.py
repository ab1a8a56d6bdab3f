"""How likely a prompt's own tokens are, as prefill says it: asked for once for all choices of the prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvcommons.pb import common_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLikelihood:
    """Of a token at its place in the prompt. `top`: the likeliest tokens there and their logprobs, best
    first."""

    token: int
    logprob: float
    rank: int
    top: Sequence[tuple[int, float]]


@dataclass(slots=True, kw_only=True)
class LogprobsOfPrompt:
    """`top`: alternatives that are wanted of each token. `found` is set once all of them are there."""

    top: int
    found: tuple[pb.PromptLogprobs, ...] | None = None

    def take(self, messages: Sequence[pb.PromptLogprobs], tokens: int) -> None:
        """Those of a prompt of so many tokens; others than of all of its positions, in order, are none."""
        next_position = 1
        for message in messages:
            if message.first != next_position:
                return
            next_position += len(message.logprobs)
        if next_position == tokens:
            self.found = tuple(messages)

    def likelihoods(self, tokens: Sequence[int]) -> Iterator[TokenLikelihood | None]:
        """Of each token of the prompt, which is these; None for the first one, before which there is
        nothing."""
        assert self.found is not None, "they are read once they are there"
        yield None
        for message in self.found:
            best = list(zip(message.top_tokens, message.top_logprobs, strict=True))
            for at, (logprob, rank) in enumerate(zip(message.logprobs, message.ranks, strict=True)):
                yield TokenLikelihood(
                    token=tokens[message.first + at],
                    logprob=logprob,
                    rank=rank,
                    top=best[at * message.top : (at + 1) * message.top],
                )
