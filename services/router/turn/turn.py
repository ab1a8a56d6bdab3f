"""A request's turn: its choices, which of them starts when, and what it used. Pure: events in, actions
out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcommons.errors import KVCommonsError
from services.router.turn import events as ev
from services.router.turn.choice import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    """In tokens. `cached_tokens` of `prompt_tokens` were not computed; of `completion_tokens`
    `reasoning_tokens` came before the answer, and `accepted_prediction_tokens` were predicted by the client,
    and verified as drafts. Those that were verified and did not come are no `completion_tokens`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Turn:
    """Several choices of one prompt share its KV: the first is prefilled first, the others start when it is
    done.

    Ended when all choices finished, or with `error` once one of them failed.
    """

    def __init__(self, prompts: Sequence[Sequence[Choice]], *, replayed: TokenUsage | None = None) -> None:
        """`prompts`: the choices of each prompt; a choice's `index` is its place among all of them.
        `replayed`: what one used that has ended before, and is replayed."""
        self._replayed = replayed
        self._prompts = prompts
        self.choices = [choice for choices in prompts for choice in choices]
        if [choice.index for choice in self.choices] != list(range(len(self.choices))):
            raise ValueError("choices are numbered in order")
        self._followers = {choices[0].index: list(choices[1:]) for choices in prompts}

    @property
    def done(self) -> bool:
        return all(choice.done for choice in self.choices)

    @property
    def error(self) -> KVCommonsError | None:
        return next((choice.error for choice in self.choices if choice.error is not None), None)

    @property
    def waits_for(self) -> KVCommonsError | None:
        """What an attempt failed of that is tried again: where time runs out, this is what the client is
        told."""
        return next((choice.waits_for for choice in self.choices if choice.waits_for is not None), None)

    @property
    def resumptions(self) -> int:
        return sum(choice.resumptions for choice in self.choices)

    @property
    def first_token_s(self) -> float | None:
        times = [choice.first_token_s for choice in self.choices if choice.first_token_s is not None]
        return min(times, default=None)

    @property
    def usage(self) -> TokenUsage:
        if self._replayed is not None:
            return self._replayed
        leaders = [choices[0] for choices in self._prompts]
        return TokenUsage(
            prompt_tokens=sum(len(choice.prompt) for choice in leaders),
            completion_tokens=sum(len(choice.answer.tokens) for choice in self.choices),
            cached_tokens=sum(choice.reuse.cached_tokens for choice in leaders if choice.reuse is not None),
            reasoning_tokens=sum(choice.answer.reasoning_tokens for choice in self.choices),
            accepted_prediction_tokens=sum(one.answer.accepted_prediction_tokens for one in self.choices),
            rejected_prediction_tokens=sum(one.answer.rejected_prediction_tokens for one in self.choices),
        )

    def begin(self) -> list[ev.Action]:
        return [action for choices in self._prompts for action in choices[0].start()]

    def handle(self, event: ev.Event, now_s: float) -> list[ev.Action]:
        actions = self.choices[event.choice].handle(event, now_s)
        return actions + self._after(event.choice)

    def tick(self, now_s: float) -> list[ev.Action]:
        """About once a second."""
        actions: list[ev.Action] = []
        for choice in self.choices:
            actions += choice.tick(now_s)
            actions += self._after(choice.index)
        return actions

    def _after(self, index: int) -> list[ev.Action]:
        choice = self.choices[index]
        if choice.error is not None:
            return self._failed()
        if choice.first_token_s is None:
            return []
        followers = self._followers.pop(index, [])
        return [action for follower in followers for action in follower.start()]

    def _failed(self) -> list[ev.Action]:
        error = self.error
        if error is None:
            return []
        return [action for choice in self.choices for action in choice.fail(error)]
