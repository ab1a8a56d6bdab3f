"""One request from its validated body to its last token: plan, queue, dispatch, commit."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

from kvcommons.errors import InvalidInput, KVCommonsError, NotFound
from kvcommons.pb.kvstore_pb2 import AnsweredRequest
from kvcommons.rblock.identity import reusable_blocks
from kvcommons.telemetry.trace import (
    CONVERSATION_ID,
    OPERATION_NAME,
    PROVIDER_NAME,
    REQUEST_MAX_TOKENS,
    REQUEST_MODEL,
    REQUEST_SEED,
    REQUEST_TEMPERATURE,
    RESPONSE_ID,
    RESPONSE_MODEL,
    Value,
)
from services.router.api.schemas.requests import ChatRequest
from services.router.http.tenants import Tenant
from services.router.serving import Serving
from services.router.sessions.truncation import (
    Context,
)
from services.router.sessions.turn import SessionTurn
from services.router.turn import events as ev
from services.router.turn.attempt import RequestContext
from services.router.turn.idempotency import RequestKey
from services.router.turn.planning import RequestPlan
from services.router.turn.replayed import ReplayedContext, answered_request


@dataclass(slots=True, kw_only=True)
class _Timestamps:
    """When things happened, by the clock."""

    queued_s: float = 0.0  # a duration
    last_token_s: float | None = None
    committed_s: float | None = None
    of_choice_s: dict[int, float] = field(default_factory=dict)  # of each choice's last delta


class RequestLifecycle:
    """Use it as a context manager: leaving it without a commit abandons the session's turn.

    Call `plan.chat` or `plan.completion`, then iterate over `deltas`: when that ends, the turn is committed,
    and `plan.turn` has its result."""

    def __init__(self, serving: Serving, *, tenant: Tenant, key: RequestKey | None = None) -> None:
        """`key`: under which the request may come again."""
        self.plan = RequestPlan(serving, tenant=tenant, key=key)
        self._serving = serving
        self._times = _Timestamps()

    async def __aenter__(self) -> RequestLifecycle:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.plan.reservation is not None:
            self.plan.settle(self.plan.reservation)
        if self.plan.session is not None and self._times.committed_s is None:
            # Who is told of a mistake asks again at once, and finds the session free. All others need not
            # wait for this, and may be gone.
            if isinstance(error, (InvalidInput, NotFound)):
                await self.plan.abandon(self.plan.session)
            else:
                self._serving.in_background(self.plan.session.abandon())

    async def deltas(self) -> AsyncGenerator[list[ev.Delta], None]:
        """What the client may see, as it comes. When it ends, all is durable that has to be."""
        if self.plan.replayed is not None:
            yield [self.plan.replayed.delta]
            return
        config, clock = self._serving.config, self._serving.clock
        deadline_s = self.plan.received_s + config.request_deadline_s
        async with self._serving.admission.slot(
            cost=len(self.plan.turn.choices),
            deadline_s=deadline_s,
            prefix=self.plan.prefix,
            promise=self.plan.promise(self.plan.service),
        ) as waited_s:
            self._times.queued_s = waited_s
            context = self._request_context(deadline_s)
            running = self._serving.dispatch.run(self.plan.turn, context, lost=self._lost)
            computing = self._serving.backlog.begin(self.plan.prompt_s)
            try:
                async with aclosing(running):
                    async for deltas in running:
                        self._serving.backlog.end(computing)
                        self._observe(deltas, clock())
                        yield deltas
            finally:
                self._serving.backlog.end(computing)
        self._times.last_token_s = clock()
        if self.plan.session is not None:
            await self._commit(self.plan.session)
        self._times.committed_s = clock()
        self._count()

    @property
    def operation(self) -> str:
        """As OpenTelemetry calls it."""
        return "chat" if isinstance(self.plan.request, ChatRequest) else "text_completion"

    def attributes(self) -> dict[str, Value]:
        """Of the request's span."""
        choice = self.plan.turn.choices[0]
        sampling = choice.sampling
        found: dict[str, Value] = {
            OPERATION_NAME: self.operation,
            PROVIDER_NAME: "kvcommons",
            REQUEST_MODEL: self.plan.request.model or self.plan.model.name,
            RESPONSE_MODEL: self.plan.model.name,
            RESPONSE_ID: self.plan.turn_id,
            REQUEST_MAX_TOKENS: choice.max_position - len(choice.prompt),
            REQUEST_TEMPERATURE: sampling.temperature,
            REQUEST_SEED: str(sampling.seed),  # does not fit the 64 bits with a sign of an attribute
        }
        return found | {CONVERSATION_ID: self.plan.session_id} if self.plan.session_id else found

    def timings(self) -> dict[str, Any]:
        """Milliseconds, tokens by where they were found, and who served; of the first choice where there are
        several."""
        times, reuse = self._times, self.plan.turn.choices[0].reuse
        first_s = self.plan.turn.first_token_s or self.plan.received_s
        last_s = times.last_token_s or first_s
        end_s = times.committed_s or last_s
        return {
            "queue_ms": _ms(times.queued_s),
            "ttft_ms": _ms(first_s - self.plan.received_s),
            "prefill_queue_ms": _ms(reuse.queue_us / 1e6) if reuse else 0.0,
            "prefill_ms": _ms(reuse.compute_us / 1e6) if reuse else 0.0,
            "load_wait_ms": _ms(reuse.load_wait_us / 1e6) if reuse else 0.0,
            "decode_ms": _ms(last_s - first_s),
            "commit_ms": _ms(end_s - last_s),
            "total_ms": _ms(end_s - self.plan.received_s),
            "device_tokens": reuse.device_tokens if reuse else 0,
            "dram_tokens": reuse.dram_tokens if reuse else 0,
            "disk_tokens": reuse.disk_tokens if reuse else 0,
            "instances": asdict(self.plan.turn.choices[0].instances),
            "resumptions": self.plan.turn.resumptions,
        }

    def _request_context(self, deadline_s: float) -> RequestContext:
        # Choices of one request, and turns of one session, are best served where their KV lies already.
        together = self.plan.turn_id if len(self.plan.turn.choices) > 1 else ""
        return RequestContext(
            turn_id=self.plan.turn_id,
            session_id=self.plan.session_id,
            tenant=self.plan.tenant.name,
            salt=self.plan.tenant.salt,
            model=self.plan.model,
            home=self.plan.home(),
            affinity=f"{self.plan.tenant.name}/{self.plan.session_id}" if self.plan.session_id else together,
            reuse=self.plan.request.reuse is not False,
            deadline_s=deadline_s,
            tbt_objective_s=self.plan.service.objectives.tbt_s,
            prediction=self.plan.prediction,
            context=self.plan.context,
        )

    def _lost(self) -> KVCommonsError | None:
        return self.plan.session.lost if self.plan.session is not None else None

    async def _commit(self, session: SessionTurn) -> None:
        assert self.plan.context is not None
        choice = self.plan.turn.choices[0]
        kept = len(session.record.tokens) - self.plan.context.dropped_tokens  # of the context
        length = len(choice.prompt) + len(choice.answer.kept)
        chain = self.plan.context.chain()
        chain.extend(choice.answer.kept)
        config, clock = self._serving.config, self._serving.clock
        begun_s = clock()
        await session.commit(
            model=self.plan.model,
            new_tokens=[*choice.prompt[kept:], *choice.answer.kept],
            new_messages=[*self.plan.new_messages, choice.answer.parts.message()],
            tools="" if session.record.version else self.plan.tools.record,
            block_ids=chain.ids[: reusable_blocks(length, self.plan.model.block_tokens)],
            new_truncations=[self.plan.truncation] if self.plan.truncation is not None else [],
            # Without reuse nothing is saved either: there is nothing to wait for.
            durable_wait_ms=0 if self.plan.request.reuse is False else config.durable_wait_ms,
            patience_s=config.commit_deadline_s,
            answered=self._answered(self.plan.context),
        )
        self._serving.metrics.commit_s.observe(clock() - begun_s)

    def _answered(self, context: Context) -> AnsweredRequest | None:
        """By which the client may ask for its answer again."""
        if self.plan.key is None:
            return None
        return answered_request(
            self.plan.key,
            self.plan.turn,
            self.plan.shown[0],
            turn_id=self.plan.turn_id,
            created_s=self.plan.created_s,
            service_tier=self.plan.service.name,
            context=ReplayedContext(dropped_tokens=context.dropped_tokens, kv=context.kv),
        )

    def _observe(self, deltas: list[ev.Delta], now_s: float) -> None:
        metrics = self._serving.metrics.requests(self.plan.model.name)
        if not self._times.of_choice_s:
            ttft_s = now_s - self.plan.received_s
            metrics.time_to_first_token_s.observe(ttft_s)
            outcome = "met" if self.plan.service.meets(ttft_s) else "missed"
            self._serving.metrics.service_classes.labels(self.plan.service.name, outcome).inc()
        for delta in deltas:
            before_s = self._times.of_choice_s.get(delta.choice)
            if before_s is not None:
                metrics.inter_token_latency_s.observe((now_s - before_s) / max(1, len(delta.tokens)))
            self._times.of_choice_s[delta.choice] = now_s
            self.plan.shown[delta.choice].extend(delta.tokens)

    def _count(self) -> None:
        metrics, usage = self._serving.metrics.requests(self.plan.model.name), self.plan.turn.usage
        metrics.e2e_request_latency_s.observe(self._serving.clock() - self.plan.received_s)
        metrics.request_queue_time_s.observe(self._times.queued_s)
        metrics.request_prompt_tokens.observe(usage.prompt_tokens)
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.prefix_cache_queries.inc(usage.prompt_tokens)
        metrics.prefix_cache_hits.inc(usage.cached_tokens)
        metrics.generation_tokens.inc(usage.completion_tokens)
        self._serving.metrics.resumptions.inc(self.plan.turn.resumptions)
        for choice in self.plan.turn.choices:
            metrics.request_generation_tokens.observe(len(choice.answer.tokens))
            metrics.succeeded(choice.finish_reason or "")


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
