"""Turns that are told again: what a session's record keeps of an answer beside its message, and the turn that
is made of both. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcommons.model.tokenizer import Tokenizer
from kvcommons.pb import common_pb2
from kvcommons.pb import kvstore_pb2 as pb
from services.router.answer.parts import Part, parts_of
from services.router.answer.text import AnswerText, Shown
from services.router.sessions.conversation import Message
from services.router.turn import events as ev
from services.router.turn.choice import Choice, Patience
from services.router.turn.idempotency import RequestKey
from services.router.turn.turn import TokenUsage, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedContext:
    """What was said of a session's context with the answer."""

    dropped_tokens: int
    kv: str

    @property
    def truncated(self) -> bool:
        return bool(self.dropped_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedTurn:
    """A turn that is in its session, as its client was told of it. `messages`: how many the session had
    then."""

    turn: Turn
    parts: tuple[Part, ...]
    shown: tuple[Shown, ...]
    answered: pb.AnsweredRequest
    model: common_pb2.ModelInfo
    messages: int
    context: ReplayedContext

    @property
    def delta(self) -> ev.Delta:
        """All of it."""
        return ev.Delta(choice=0, attempt=0, parts=self.parts, tokens=self.shown)


def answered_request(
    key: RequestKey,
    turn: Turn,
    shown: Sequence[Shown],
    *,
    turn_id: str,
    created_s: int,
    service_tier: str,
    context: ReplayedContext,
) -> pb.AnsweredRequest:
    """What the record keeps of an answer that is being committed. Of log-probabilities those that were asked
    for."""
    (choice,), usage = turn.choices, turn.usage
    return pb.AnsweredRequest(
        key=key.key,
        request=key.request,
        turn_id=turn_id,
        created_s=created_s,
        service_tier=service_tier,
        finish_reason=choice.finish_reason or "",
        matched_stop=choice.answer.matched_stop,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        accepted_prediction_tokens=usage.accepted_prediction_tokens,
        rejected_prediction_tokens=usage.rejected_prediction_tokens,
        shown=[pb.ShownToken(start=start, token=token) for start, token in shown]
        if choice.sampling.logprobs
        else (),
        dropped_tokens=context.dropped_tokens,
        kv=context.kv,
    )


def replayed_turn(record: pb.SessionRecord, key: RequestKey, tokenizer: Tokenizer) -> ReplayedTurn | None:
    """The turn that answered the key's request; None where the session has none. However many came after it.
    Raises IdempotencyKeyReused."""
    for at, stored in enumerate(record.messages):
        if stored.HasField("answered") and stored.answered.key == key.key:
            key.check_same(stored.answered.request)
            return _replayed(record, at, tokenizer)
    return None


def _replayed(record: pb.SessionRecord, at: int, tokenizer: Tokenizer) -> ReplayedTurn:
    stored, answered = record.messages[at], record.messages[at].answered
    parts = parts_of(Message.of(stored))
    answer = AnswerText(tokenizer, stops=(), stop_ids=())
    answer.parts.add(parts)
    answer.matched_stop = answered.matched_stop if answered.HasField("matched_stop") else None
    choice = Choice(
        index=0,
        prompt=(),
        max_position=0,
        sampling=common_pb2.Sampling(logprobs=bool(answered.shown)),
        text=answer,
        patience=Patience(resume_s=0.0, stall_s=0.0),
    )
    choice.finish_reason = answered.finish_reason
    usage = TokenUsage(
        prompt_tokens=answered.prompt_tokens,
        completion_tokens=answered.completion_tokens,
        cached_tokens=answered.cached_tokens,
        reasoning_tokens=answered.reasoning_tokens,
        accepted_prediction_tokens=answered.accepted_prediction_tokens,
        rejected_prediction_tokens=answered.rejected_prediction_tokens,
    )
    return ReplayedTurn(
        turn=Turn([[choice]], replayed=usage),
        parts=tuple(parts),
        shown=tuple((one.start, one.token) for one in answered.shown),
        answered=answered,
        model=common_pb2.ModelInfo(name=record.model_name, fingerprint=record.model),
        messages=at + 1,
        context=ReplayedContext(dropped_tokens=answered.dropped_tokens, kv=answered.kv),
    )
