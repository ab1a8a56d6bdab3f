"""One request from its validated body to its last token: session, plan, queue, dispatch, commit."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any

from kvcommons.errors import InvalidInput, KVCommonsError, VersionConflict
from kvcommons.homes import session_key
from kvcommons.pb.common_pb2 import ModelInfo
from kvcommons.pb.kvstore_pb2 import AnsweredRequest, SessionRecord
from kvcommons.rblock.identity import IdentityChain, reusable_blocks
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
from services.router.admission.classes import ServiceClass
from services.router.admission.queue import NO_PREFIX, Prefix
from services.router.admission.quotas import TokenReservation
from services.router.admission.scheduling import Promise
from services.router.answer.text import Shown
from services.router.api.schemas.requests import ChatRequest, CompletionRequest
from services.router.fleet.stored import stored_blocks
from services.router.http.tenants import Tenant
from services.router.serving import Serving
from services.router.sessions.beginning import begin_in_branch, begin_turn, checked_model
from services.router.sessions.branches import branches_of, whole_records
from services.router.sessions.branching import GivenTurn, is_history, root_of_branch
from services.router.sessions.conversation import Message, check_results, new_messages
from services.router.sessions.naming import NamedSession
from services.router.sessions.replay import stored_of_stages
from services.router.sessions.truncation import (
    Context,
    Truncation,
    answer_tokens_of,
    recomputed,
    replay_costs,
    truncation_for,
)
from services.router.sessions.turn import SessionTurn
from services.router.turn import events as ev
from services.router.turn.attempt import RequestContext
from services.router.turn.choice import Patience
from services.router.turn.grammar import chat_grammar, compiled_grammar, content_grammar
from services.router.turn.idempotency import RequestKey
from services.router.turn.options import template_options
from services.router.turn.plan import max_tokens_of, messages_of, plan_turn, prompts_of
from services.router.turn.replayed import ReplayedTurn, ToldContext, answered_request, replayed_turn
from services.router.turn.sampling import prompt_logprobs_of
from services.router.turn.tools import NO_TOOLS, ToolOffer, definitions_of, offered_tools
from services.router.turn.turn import Turn
from services.router.turn.volatile import NO_VOLATILE_LINES, VolatileLines

_ABANDONED_S = 1.0


@dataclass(slots=True, kw_only=True)
class _Timestamps:
    """When things happened, by the clock."""

    received_s: float
    queued_s: float = 0.0  # a duration
    last_token_s: float | None = None
    committed_s: float | None = None
    of_choice_s: dict[int, float] = field(default_factory=dict)  # of each choice's last delta


class RequestLifecycle:
    """Use it as a context manager: leaving it without a commit abandons the session's turn.

    Call `plan_chat` or `plan_completion`, then iterate over `deltas`: when that ends, the turn is committed,
    and `turn` has its result."""

    def __init__(self, serving: Serving, *, tenant: Tenant, key: RequestKey | None = None) -> None:
        """`key`: under which the request may come again."""
        self.model: ModelInfo
        self.turn: Turn
        self.service: ServiceClass
        self.shown: list[list[Shown]] = []  # the tokens of each choice whose text was released
        self.created_s = int(time.time())
        # Not the request's id: clients choose that one, and may send it twice.
        self.turn_id = secrets.token_hex(12)
        self._serving = serving
        self._tenant = tenant
        self._key = key
        self.replayed: ReplayedTurn | None = None  # where the request was answered before
        self._admitted = False
        self._request: ChatRequest | CompletionRequest
        self._session: SessionTurn | None = None
        self.session_id = ""  # of the session or branch that the turn is of
        self.volatile = NO_VOLATILE_LINES
        self._new: list[Message] = []
        self._tools = NO_TOOLS
        self._options: dict[str, Any] = {}  # of the chat template
        self.context: Context | None = None  # of a session, as the turn sees it
        self.branch: str | None = None  # of the session that was asked for, where the turn goes on in one
        self._truncation: Truncation | None = None  # with which this turn begins
        self._reservation: TokenReservation | None = None
        self._prompt_s = 0.0  # what computing its prompts is expected to take
        self._times = _Timestamps(received_s=serving.clock())

    async def __aenter__(self) -> RequestLifecycle:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reservation is not None:
            self._settle(self._reservation)
        if self._session is not None and self._times.committed_s is None:
            # Who is told of a mistake asks again at once, and finds the session free. All others need not
            # wait for this, and may be gone.
            if isinstance(error, InvalidInput):
                await self._abandon(self._session)
            else:
                self._serving.in_background(self._session.abandon())

    async def _abandon(self, session: SessionTurn) -> None:
        """Returns once the session is free for another turn, or a moment later in any case."""
        abandoned = self._serving.in_background(session.abandon())
        await asyncio.wait((abandoned,), timeout=_ABANDONED_S)

    async def plan_chat(
        self,
        request: ChatRequest,
        named: NamedSession | None,
        *,
        before: Sequence[Message] = (),
        held: int | None = None,
        branches: bool = False,
        whole: bool = False,
    ) -> None:
        """Begins the session's turn where there is a session, and renders what is new.

        `before`: messages that come before those of the request. `held`: how many messages the session has to
        hold; VersionConflict is raised where it holds more or less, and another plan may follow. `branches`:
        a whole history that departs from the session goes on in a branch of it, and so does a turn of a
        shared one that is busy. `whole`: the messages are the whole conversation."""
        if named is not None and (request.n or 1) > 1:
            raise InvalidInput("n has to be 1 in a session: it goes on with one answer", param="n")
        self._admit()
        self.service = self._asked(request)
        mode = self._serving.config.volatile_lines
        self.volatile = VolatileLines.of([*before, *messages_of(request)], mode)
        given = list(self.volatile.messages)
        self.model = self._serving.fleet.model(request.model)
        history: list[Message] = []
        tokens: list[int] = []
        kept_tools: str | None = None
        if named is not None:
            self._session = await self._begin(named, request, given, branches=branches, whole=whole)
        if named is not None and self._session is not None:
            self.session_id = self._session.record.session_id
            self.branch = self.session_id if self.session_id != named.id else None
            if self._tells_again(request, self._session.record):
                await self._abandon(self._session)  # the next turn may follow at once
                self._session = None
                return
            self.model = checked_model(self._serving, self._session, self.model, asked=request.model)
            history = self._session.messages
            if held is not None and len(history) != held:
                await self._abandon(self._session)  # another plan begins a turn of it
                self._session, self.session_id = None, ""
                raise VersionConflict("the session has gone on meanwhile")
            tokens = list(self._session.record.tokens)
            self._new = new_messages(history, given)
            kept_tools = self._session.record.tools if self._session.record.version else None
        elif request.truncation == "auto":
            raise InvalidInput(
                "truncation is of sessions: send session_id, or shorten messages", param="truncation"
            )
        else:
            check_results(given)
            self._new = given
        self._tools = offered_tools(request, kept_tools)
        self._options = template_options(request, self._serving.text.template)
        form = self._serving.text.answer_format(self._options)
        self._grammar = await self._compiled(chat_grammar(request, form, self._tools), request)
        new = await self._serving.text.chat(
            history,
            tokens,
            self._new,
            tools=self._tools,
            options=self._options,
            window=self.model.context_window,
        )
        if self._session is not None:
            self.context = await self._context(self._session, request, tokens, new)
            self._plan(request, [list(self.context.now.tokens)])
        else:
            self._plan(request, [[*tokens, *new]])
        await self._classify()

    async def answered_before(
        self, request: ChatRequest, *session_ids: str, branches: bool = False, whole: bool = False
    ) -> str | None:
        """The session whose record has the answer to this very request, which is told again then: nothing is
        to be planned. `branches`: it may be in a branch of the session, where the messages are a whole
        conversation, or may be (`whole`). None: nothing is known of it; whoever begins the turn looks once
        more. Raises IdempotencyKeyReused, StoreUnavailable."""
        if self._key is None:
            return None
        if request.prompt_logprobs is not None:
            raise InvalidInput(
                "prompt_logprobs are not kept in a session, so the answer could not be given again: leave "
                "them, or the Idempotency-Key, out",
                param="prompt_logprobs",
            )
        self._admit()
        records = await whole_records(self._serving, self._tenant, session_ids)
        if records and branches and (whole or is_history((), messages_of(request))):
            of = root_of_branch(session_ids[0])
            heads = await branches_of(self._serving, self._tenant, of)
            others = [one for one in (of, *(head.session_id for head in heads)) if one not in session_ids]
            records += await whole_records(self._serving, self._tenant, others)
        for record in records:
            if self._tells_again(request, record):
                if branches and record.session_id not in session_ids:
                    self.branch = record.session_id
                return record.session_id
        return None

    def _tells_again(self, request: ChatRequest, record: SessionRecord) -> bool:
        """Whether the session has answered the request, which is told again from here on."""
        if self._key is None:
            return False
        replayed = replayed_turn(record, self._key, self._serving.text.tokenizer)
        if replayed is None:
            return False
        answered = replayed.answered
        self.replayed, self.turn, self.model = replayed, replayed.turn, replayed.model
        self.shown, self.context = [list(replayed.shown)], None
        self.turn_id, self.created_s = answered.turn_id, answered.created_s
        self.service = replace(self._asked(request), name=answered.service_tier)
        self._request, self.session_id = request, record.session_id
        return True

    def _admit(self) -> None:
        """Once a request."""
        if not self._admitted:
            self._serving.quotas.admit(self._tenant.name, self._times.received_s)
        self._admitted = True

    async def _compiled(self, grammar: tuple[str, str], request: ChatRequest | CompletionRequest) -> str:
        """As `compiled_grammar` does it."""
        return await compiled_grammar(grammar, request, self._tenant.name, self._serving.grammars)

    async def _begin(
        self,
        named: NamedSession,
        request: ChatRequest,
        given: Sequence[Message],
        *,
        branches: bool,
        whole: bool,
    ) -> SessionTurn | None:
        """The turn of the session, or of a branch; None where a shared session's turn does without."""
        if not branches:
            return await begin_turn(self._serving, self._tenant, named.id, self.turn_id)
        tools = ToolOffer(definitions=definitions_of(request)).record if request.tools or whole else None
        turn = GivenTurn(
            messages=given,
            tools=tools,
            shared=named.shared,
            whole=whole,
            head_changes=self.volatile.head_changes,
            model=self.model.name if named.shared else None,
        )
        of = self._serving, self._tenant, named, self.turn_id
        return await begin_in_branch(*of, turn, block_tokens=self.model.block_tokens)

    async def plan_completion(self, request: CompletionRequest) -> None:
        self._admit()
        self.service = self._asked(request)
        self._grammar = await self._compiled(content_grammar(request), request)
        self.model = self._serving.fleet.model(request.model)
        prompts = await prompts_of(
            request, self._serving.text, self.model, choices_max=self._serving.config.max_choices
        )
        self._plan(request, prompts)
        await self._classify()

    async def deltas(self) -> AsyncGenerator[list[ev.Delta], None]:
        """What the client may see, as it comes. When it ends, all is durable that has to be."""
        if self.replayed is not None:
            yield [self.replayed.delta]
            return
        config, clock = self._serving.config, self._serving.clock
        deadline_s = self._times.received_s + config.request_deadline_s
        async with self._serving.admission.slot(
            cost=len(self.turn.choices),
            deadline_s=deadline_s,
            prefix=self._prefix,
            promise=self._promise(self.service),
        ) as waited_s:
            self._times.queued_s = waited_s
            context = self._request_context(deadline_s)
            running = self._serving.dispatch.run(self.turn, context, lost=self._lost)
            computing = self._serving.backlog.begin(self._prompt_s)
            try:
                async with aclosing(running):
                    async for deltas in running:
                        self._serving.backlog.end(computing)
                        self._observe(deltas, clock())
                        yield deltas
            finally:
                self._serving.backlog.end(computing)
        self._times.last_token_s = clock()
        if self._session is not None:
            await self._commit(self._session)
        self._times.committed_s = clock()
        self._count()

    @property
    def messages_after(self) -> int:
        """How many messages a session holds after this turn."""
        if self.replayed is not None:
            return self.replayed.messages
        stored = len(self._session.messages) if self._session is not None else 0
        return stored + len(self._new) + 1

    @property
    def in_session(self) -> bool:
        """Whether the answer is in a session's record when it is complete."""
        return bool(self.session_id)

    @property
    def told_context(self) -> Context | ToldContext | None:
        """Of a session."""
        return self.context if self.replayed is None else self.replayed.context

    @property
    def operation(self) -> str:
        """As OpenTelemetry calls it."""
        return "chat" if isinstance(self._request, ChatRequest) else "text_completion"

    def attributes(self) -> dict[str, Value]:
        """Of the request's span."""
        choice = self.turn.choices[0]
        sampling = choice.sampling
        found: dict[str, Value] = {
            OPERATION_NAME: self.operation,
            PROVIDER_NAME: "kvcommons",
            REQUEST_MODEL: self._request.model or self.model.name,
            RESPONSE_MODEL: self.model.name,
            RESPONSE_ID: self.turn_id,
            REQUEST_MAX_TOKENS: choice.max_position - len(choice.prompt),
            REQUEST_TEMPERATURE: sampling.temperature,
            REQUEST_SEED: str(sampling.seed),  # does not fit the 64 bits with a sign of an attribute
        }
        return found | {CONVERSATION_ID: self.session_id} if self.session_id else found

    def timings(self) -> dict[str, Any]:
        """Milliseconds, tokens by where they were found, and who served; of the first choice where there are
        several."""
        times, reuse = self._times, self.turn.choices[0].reuse
        first_s = self.turn.first_token_s or times.received_s
        last_s = times.last_token_s or first_s
        end_s = times.committed_s or last_s
        return {
            "queue_ms": _ms(times.queued_s),
            "ttft_ms": _ms(first_s - times.received_s),
            "prefill_queue_ms": _ms(reuse.queue_us / 1e6) if reuse else 0.0,
            "prefill_ms": _ms(reuse.compute_us / 1e6) if reuse else 0.0,
            "load_wait_ms": _ms(reuse.load_wait_us / 1e6) if reuse else 0.0,
            "decode_ms": _ms(last_s - first_s),
            "commit_ms": _ms(end_s - last_s),
            "total_ms": _ms(end_s - times.received_s),
            "device_tokens": reuse.device_tokens if reuse else 0,
            "dram_tokens": reuse.dram_tokens if reuse else 0,
            "disk_tokens": reuse.disk_tokens if reuse else 0,
            "instances": asdict(self.turn.choices[0].instances),
            "resumptions": self.turn.resumptions,
        }

    async def _context(
        self, session: SessionTurn, request: ChatRequest, tokens: list[int], new: list[int]
    ) -> Context:
        """What the turn sees; a truncation with which it begins stays in `_truncation`."""
        model, config = self.model, self._serving.config
        stored = session.truncations
        if request.truncation == "auto" and tokens:
            dropped = sum(one.dropped_tokens for one in stored)
            head = stored[-1].head_tokens if stored else None
            if head is None:
                head = await self._serving.text.head_tokens(
                    session.messages, tokens, model.block_tokens, self._tools
                )
            self._truncation = truncation_for(
                kept_tokens=len(tokens) - dropped,
                dropped_tokens=dropped,
                head_tokens=head,
                new_tokens=len(new),
                answer_tokens=answer_tokens_of(max_tokens_of(request), model.context_window),
                window=model.context_window,
                ratio=config.truncation_ratio,
                block_tokens=model.block_tokens,
            )
        context = self._context_with(session, [*tokens, *new])
        if len(context.stages) == 1:
            return context
        for name, asked in (("reuse", request.reuse is False), ("prompt_logprobs", _reads_prompt(request))):
            if asked:
                raise InvalidInput(
                    f"{name} cannot be had behind a truncation: the session's KV was computed with tokens "
                    "that are not in its context any more, and is not computed anew",
                    param=name,
                )
        fleet = self._serving.fleet.homed(self._home())
        found = await stored_of_stages(fleet, model, context.stages, timeout_s=config.request_deadline_s)
        if found is None:  # nothing is given up for a store that is slow to answer
            return context
        first, cost = replay_costs(context.stages, found)
        last = len(context.stages) - 1
        if first < last and cost > config.replay_max * len(context.now.tokens):
            self._truncation = recomputed(stored, self._truncation)
            context = self._context_with(session, [*tokens, *new])
            context.kv = "recomputed"
        return context

    def _context_with(self, session: SessionTurn, tokens: list[int]) -> Context:
        added = [self._truncation] if self._truncation is not None else []
        return Context(
            salt=self._tenant.salt,
            model=self.model,
            tokens=tokens,
            truncations=[*session.truncations, *added],
            known_ids=session.record.block_ids,
        )

    def _asked(self, request: ChatRequest | CompletionRequest) -> ServiceClass:
        return self._serving.classes.of(self._tenant.name, request.service_tier)

    def _plan(self, request: ChatRequest | CompletionRequest, prompts: list[list[int]]) -> None:
        config = self._serving.config
        self._request = request
        self.turn = plan_turn(
            request,
            prompts,
            model=self.model,
            text=self._serving.text,
            seed=self._serving.seed(),
            patience=Patience(resume_s=config.resume_deadline_s, stall_s=config.stall_s),
            choices_max=config.max_choices,
            grammar=self._grammar,
            tools=self._tools,
            options=self._options,
        )
        self.shown = [[] for _ in self.turn.choices]
        self._reservation = self._serving.quotas.reserve(
            self._tenant.name, self.turn.usage.prompt_tokens, self._serving.clock()
        )

    def _settle(self, reservation: TokenReservation) -> None:
        """A prompt of which no token came was not computed, as far as anybody knows."""
        usage = self.turn.usage
        begun = self.turn.first_token_s is not None
        reservation.settle(
            prompt=usage.prompt_tokens if begun else 0,
            cached=usage.cached_tokens if begun else 0,
            completion=usage.completion_tokens,
            now_s=self._serving.clock(),
        )

    def _promise(self, service: ServiceClass) -> Promise:
        objective_s = service.objectives.ttft_s
        return Promise(
            tenant=self._tenant.name,
            ttft_s=math.inf if objective_s is None else objective_s,
            expected_s=self._prompt_s,
        )

    async def _classify(self) -> None:
        """Decides as which class the request is served. Raises Overloaded where the one that it asked for
        refuses it."""
        kept = 0
        if self._session is not None and self.context is not None:
            kept = len(self._session.record.tokens) - self.context.dropped_tokens
        self._prompt_s = self._prompt_seconds(kept)
        asked, fleet, ttft_s = self.service, self._serving.fleet, 0.0
        if asked.objectives.ttft_s is not None:
            ttft_s = self._expected_ttft_s()
            if self._session is None and not asked.meets(ttft_s):
                prefix = self._prefix()  # it was reckoned as if nothing of it were stored
                store, patience_s = fleet.homed(prefix.home), self._serving.config.request_deadline_s
                stored = await stored_blocks(
                    store, self.model, prefix.block_ids, timeout_s=patience_s, peek=True
                )
                self._prompt_s = self._prompt_seconds((stored or 0) * self.model.block_tokens)
                ttft_s = self._expected_ttft_s()
        token_s = fleet.token_seconds(self.model) if asked.objectives.tbt_s is not None else 0.0
        self.service = self._served(asked, ttft_s, token_s)

    @property
    def reads_prompt(self) -> bool:
        """Whether the answer says how likely the prompt's own tokens are, which is much to write."""
        return _reads_prompt(self._request)

    @property
    def _computes_all(self) -> bool:
        """Of a prompt, whatever is stored of it."""
        return self._request.reuse is False or self.reads_prompt

    def _prompt_seconds(self, stored_tokens: int) -> float:
        """What computing its prompts is expected to take, but for so many tokens of each."""
        first = 0 if self._computes_all else stored_tokens
        prompts = {id(choice.prompt): len(choice.prompt) for choice in self.turn.choices}
        fleet = self._serving.fleet
        return sum(fleet.prompt_seconds(self.model, range(first, tokens)) for tokens in prompts.values())

    def _expected_ttft_s(self) -> float:
        """From its arrival to its first token."""
        serving, seconds = self._serving, self._prompt_s
        wait_s = serving.admission.expected_wait_s(len(self.turn.choices), self._promise(self.service))
        ahead_s = serving.backlog.ahead_s(seconds, instances=serving.fleet.prefills(self.model))
        return serving.clock() - self._times.received_s + wait_s + ahead_s + seconds

    def _served(self, asked: ServiceClass, ttft_s: float, token_s: float) -> ServiceClass:
        count = self._serving.metrics.service_classes
        try:
            served = asked.expecting(ttft_s, token_s=token_s)
        except KVCommonsError:
            count.labels(asked.name, "refused").inc()
            raise
        if served != asked:
            count.labels(asked.name, "best_effort").inc()
        return served

    def _request_context(self, deadline_s: float) -> RequestContext:
        # Choices of one request, and turns of one session, are best served where their KV lies already.
        together = self.turn_id if len(self.turn.choices) > 1 else ""
        return RequestContext(
            turn_id=self.turn_id,
            session_id=self.session_id,
            tenant=self._tenant.name,
            salt=self._tenant.salt,
            model=self.model,
            home=self._home(),
            affinity=f"{self._tenant.name}/{self.session_id}" if self.session_id else together,
            reuse=self._request.reuse is not False,
            deadline_s=deadline_s,
            tbt_objective_s=self.service.objectives.tbt_s,
            context=self.context,
        )

    def _prefix(self) -> Prefix:
        """Of the first prompt, where there are several."""
        if self._computes_all:
            return NO_PREFIX
        prompt, model = self.turn.choices[0].prompt, self.model
        reusable = reusable_blocks(len(prompt), model.block_tokens)
        if self.context is not None:
            ids = self.context.now.ids[:reusable]
            return Prefix(model=model.fingerprint, block_ids=ids, home=self._home())
        chain = IdentityChain(self._tenant.salt, model.fingerprint, model.block_tokens)
        chain.extend(prompt[: reusable * model.block_tokens])
        home = self._home() or b"".join(chain.ids[:1])
        return Prefix(model=model.fingerprint, block_ids=chain.ids, home=home)

    def _home(self) -> bytes:
        """A session's blocks, and its forks', lie where that of its root is; without a session it is up to
        the prompt."""
        if self._session is None:
            return b""
        return session_key(self._tenant.name, self._session.record.root)

    def _lost(self) -> KVCommonsError | None:
        return self._session.lost if self._session is not None else None

    async def _commit(self, session: SessionTurn) -> None:
        assert self.context is not None
        choice = self.turn.choices[0]
        tokens = [*choice.prompt, *choice.answer.kept]  # of the context
        kept = len(session.record.tokens) - self.context.dropped_tokens
        chain = self.context.chain()
        chain.extend(choice.answer.kept)
        config, clock = self._serving.config, self._serving.clock
        begun_s = clock()
        await session.commit(
            model=self.model,
            new_tokens=tokens[kept:],
            new_messages=[*self._new, choice.answer.parts.message()],
            tools="" if session.record.version else self._tools.record,
            block_ids=chain.ids[: reusable_blocks(len(tokens), self.model.block_tokens)],
            new_truncations=[self._truncation] if self._truncation is not None else [],
            # Without reuse nothing is saved either: there is nothing to wait for.
            durable_wait_ms=0 if self._request.reuse is False else config.durable_wait_ms,
            patience_s=config.commit_deadline_s,
            answered=self._answered(self.context),
        )
        self._serving.metrics.commit_s.observe(clock() - begun_s)

    def _answered(self, context: Context) -> AnsweredRequest | None:
        """By which the client may ask for its answer again."""
        if self._key is None:
            return None
        return answered_request(
            self._key,
            self.turn,
            self.shown[0],
            turn_id=self.turn_id,
            created_s=self.created_s,
            service_tier=self.service.name,
            context=ToldContext(dropped_tokens=context.dropped_tokens, kv=context.kv),
        )

    def _observe(self, deltas: list[ev.Delta], now_s: float) -> None:
        metrics = self._serving.metrics.requests(self.model.name)
        if not self._times.of_choice_s:
            ttft_s = now_s - self._times.received_s
            metrics.time_to_first_token_s.observe(ttft_s)
            outcome = "met" if self.service.meets(ttft_s) else "missed"
            self._serving.metrics.service_classes.labels(self.service.name, outcome).inc()
        for delta in deltas:
            before_s = self._times.of_choice_s.get(delta.choice)
            if before_s is not None:
                metrics.inter_token_latency_s.observe((now_s - before_s) / max(1, len(delta.tokens)))
            self._times.of_choice_s[delta.choice] = now_s
            self.shown[delta.choice].extend(delta.tokens)

    def _count(self) -> None:
        metrics, usage = self._serving.metrics.requests(self.model.name), self.turn.usage
        metrics.e2e_request_latency_s.observe(self._serving.clock() - self._times.received_s)
        metrics.request_queue_time_s.observe(self._times.queued_s)
        metrics.request_prompt_tokens.observe(usage.prompt_tokens)
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.prefix_cache_queries.inc(usage.prompt_tokens)
        metrics.prefix_cache_hits.inc(usage.cached_tokens)
        metrics.generation_tokens.inc(usage.completion_tokens)
        self._serving.metrics.resumptions.inc(self.turn.resumptions)
        for choice in self.turn.choices:
            metrics.request_generation_tokens.observe(len(choice.answer.tokens))
            metrics.succeeded(choice.finish_reason or "")


def _reads_prompt(request: ChatRequest | CompletionRequest) -> bool:
    return prompt_logprobs_of(request) is not None


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
