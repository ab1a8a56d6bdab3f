"""A choice of an answer, and the events that it hears: for the tests of its state machine."""

from __future__ import annotations

from pathlib import Path

from kvcommons.errors import Unavailable
from kvcommons.model.tokenizer import Tokenizer
from kvcommons.pb import common_pb2 as pb
from services.router.answer.parts import Content, joined
from services.router.answer.text import AnswerText
from services.router.turn import events as ev
from services.router.turn.choice import Choice, Patience
from services.router.turn.prompt_logprobs import LogprobsOfPrompt

PROMPT = [5, 6, 7]


def demo_tokenizer() -> Tokenizer:
    return Tokenizer.read(Path(__file__).parents[3] / "demo" / "model")


def choice_of(
    tokenizer: Tokenizer,
    *,
    stops: tuple[str, ...] = (),
    capacity: int = 100,
    stall_s: float = 5,
    prompt_logprobs: LogprobsOfPrompt | None = None,
) -> Choice:
    return Choice(
        index=0,
        prompt=PROMPT,
        max_position=len(PROMPT) + capacity,
        sampling=pb.Sampling(),
        text=AnswerText(tokenizer, stops=stops, stop_ids=tokenizer.eos_ids),
        patience=Patience(resume_s=10, stall_s=stall_s),
        prompt_logprobs=prompt_logprobs,
    )


def sampled(tokens: list[int], first: int = 0) -> tuple[pb.SampledToken, ...]:
    return tuple(
        pb.SampledToken(token=token, position=len(PROMPT) + first + at) for at, token in enumerate(tokens)
    )


def tokens(attempt: int, ids: list[int], first: int = 0) -> ev.Tokens:
    return ev.Tokens(choice=0, attempt=attempt, tokens=sampled(ids, first))


def first_of(
    attempt: int, token: int, at: int = 0, cached: int = 2, logprobs: tuple[pb.PromptLogprobs, ...] = ()
) -> ev.First:
    return ev.First(
        choice=0,
        attempt=attempt,
        token=sampled([token], at)[0],
        cached_tokens=cached,
        device_tokens=0,
        queue_us=1,
        compute_us=2,
        load_wait_us=3,
        prompt_logprobs=logprobs,
    )


def finished(attempt: int, reason: str = "length") -> ev.Finished:
    return ev.Finished(choice=0, attempt=attempt, reason=reason)


def prefill_failed(attempt: int) -> ev.PrefillFailed:
    return ev.PrefillFailed(choice=0, attempt=attempt, error=Unavailable("gone"))


def decode_failed(attempt: int) -> ev.DecodeFailed:
    return ev.DecodeFailed(choice=0, attempt=attempt, error=Unavailable("gone"))


def shown(actions: list[ev.Action]) -> str:
    parts = joined(part for action in actions if isinstance(action, ev.Delta) for part in action.parts)
    assert all(isinstance(part, Content) for part in parts)
    return "".join(part.text for part in parts)
