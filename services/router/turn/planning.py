"""One request from its validated body to what is to be computed: its session's turn, its tokens, its class of
service. Or to its answer, where it was answered before and that is told again."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvcommons.branch_ids import root_of_branch
from kvcommons.errors import InvalidInput, KVCommonsError, VersionConflict
from kvcommons.homes import session_key
from kvcommons.pb.common_pb2 import ModelInfo
from kvcommons.pb.kvstore_pb2 import SessionRecord
from kvcommons.rblock.identity import IdentityChain, reusable_blocks
from kvcommons.token_ids import token_array
from services.router.admission.classes import ServiceClass
from services.router.admission.queue import NO_PREFIX, Prefix
from services.router.admission.quotas import TokenReservation
from services.router.admission.scheduling import Promise
from services.router.answer.text import Shown
from services.router.api.schemas.requests import ChatRequest, CompletionRequest
from services.router.fleet.stored import stored_blocks
from services.router.http.tenants import Tenant
from services.router.serving import Serving
from services.router.sessions.beginning import begin_in_branch, begin_turn
from services.router.sessions.branches import branches_of, whole_records
from services.router.sessions.branching import GivenTurn, is_history
from services.router.sessions.conversation import Message, check_results, new_messages
from services.router.sessions.model import checked_model
from services.router.sessions.naming import NamedSession
from services.router.sessions.replay import stored_of_excerpts
from services.router.sessions.truncation import (
    Context,
    Truncation,
    answer_tokens_of,
    recomputed,
    replay_costs,
    truncation_for,
)
from services.router.sessions.turn import SessionTurn
from services.router.turn.choice import Patience
from services.router.turn.grammar import chat_grammar, compiled_grammar, content_grammar
from services.router.turn.idempotency import RequestKey
from services.router.turn.options import template_options
from services.router.turn.plan import max_tokens_of, messages_of, plan_turn, prompts_of
from services.router.turn.replayed import ReplayedContext, ReplayedTurn, replayed_turn
from services.router.turn.sampling import prompt_logprobs_of
from services.router.turn.tools import NO_TOOLS, ToolOffer, definitions_of, offered_tools
from services.router.turn.turn import Turn
from services.router.turn.volatile import NO_VOLATILE_LINES, VolatileLines

_ABANDONED_S = 1.0  # a client waits so long for its session to be free


class RequestPlan:
    """Call `chat` or `completion`; then `turn` is to be run, or has been (`replayed`). Whoever runs it ends
    the session's turn, and settles the reservation."""

    def __init__(self, serving: Serving, *, tenant: Tenant, key: RequestKey | None = None) -> None:
        """`key`: under which the request may come again."""
        self.model: ModelInfo
        self.turn: Turn
        self.service: ServiceClass
        self.shown: list[list[Shown]] = []  # the tokens of each choice whose text was released
        self.created_s = int(time.time())
        # Not the request's id: clients choose that one, and may send it twice.
        self.turn_id = secrets.token_hex(12)
        self.tenant = tenant
        self.key = key
        self.replayed: ReplayedTurn | None = None  # where the request was answered before
        self.request: ChatRequest | CompletionRequest
        self.session: SessionTurn | None = None
        self.session_id = ""  # of the session or branch that the turn is of
        self.volatile = NO_VOLATILE_LINES
        self.new_messages: list[Message] = []
        self.tools = NO_TOOLS
        self.context: Context | None = None  # of a session, as the turn sees it
        self.branch: str | None = None  # of the session that was asked for, where the turn goes on in one
        self.truncation: Truncation | None = None  # with which this turn begins
        self.prediction: list[int] = []  # what its answers may be
        self.reservation: TokenReservation | None = None
        self.prompt_s = 0.0  # what computing its prompts is expected to take
        self.received_s = serving.clock()
        self._serving = serving
        self._admitted = False
        self._options: dict[str, Any] = {}  # of the chat template

    async def chat(
        self,
        request: ChatRequest,
        named: NamedSession | None,
        *,
        before: Sequence[Message] = (),
        held: int | None = None,
        branches: bool = False,
        whole: bool = False,
        texts: Mapping[str, str] | None = None,
        others: Sequence[str] = (),
    ) -> None:
        """Begins the session's turn where there is a session, and renders what is new. Where the session, or
        one of `others`, has answered this very request, that is told again, and nothing is planned.

        `before`: messages that come before those of the request. `held`: how many messages the session has to
        hold; VersionConflict is raised where it holds more or less, and another plan may follow. `branches`:
        a whole history that departs from the session goes on in a branch of it, and so does a turn of a
        shared one that is busy. `whole`: the messages are the whole conversation. `texts`:
        grammars of the input of tools whose input is text, by their names."""
        if named is not None and (request.n or 1) > 1:
            raise InvalidInput("n has to be 1 in a session: it goes on with one answer", param="n")
        if named is not None:
            asked = list(dict.fromkeys((named.id, *others)))
            if await self._answered_before(request, asked, branches=branches, whole=whole or named.shared):
                return
        self._admit()
        self.service = self._asked(request)
        mode = self._serving.config.volatile_lines
        self.volatile = VolatileLines.of([*before, *messages_of(request)], mode)
        given = list(self.volatile.messages)
        self.model = self._serving.fleet.model(request.model)
        history: list[Message] = []
        tokens = token_array()
        kept_tools: str | None = None
        if named is not None:
            self.session = await self._begin(named, request, given, branches=branches, whole=whole)
        if named is not None and self.session is not None:
            self.session_id = self.session.record.session_id
            self.branch = self.session_id if self.session_id != named.id else None
            if self._tells_again(request, self.session.record):
                await self.abandon(self.session)  # the next turn may follow at once
                self.session = None
                return
            fleet, record = self._serving.fleet, self.session.record
            self.model = checked_model(fleet, record, self.model, asked=request.model)
            history = self.session.messages
            if held is not None and len(history) != held:
                await self.abandon(self.session)  # another plan begins a turn of it
                self.session, self.session_id = None, ""
                raise VersionConflict("the session has gone on meanwhile")
            tokens = self.session.tokens
            self.new_messages = new_messages(history, given)
            kept_tools = self.session.record.tools if self.session.record.version else None
        elif request.truncation == "auto":
            raise InvalidInput(
                "truncation is of sessions: send session_id, or shorten messages", param="truncation"
            )
        else:
            check_results(given)
            self.new_messages = given
        self.tools = offered_tools(request, kept_tools, texts=texts)
        self._options = template_options(request, self._serving.text.template)
        form = self._serving.text.answer_format(self._options)
        self._grammar = await self._compiled(chat_grammar(request, form, self.tools), request)
        new = await self._serving.text.chat(
            history,
            tokens,
            self.new_messages,
            tools=self.tools,
            options=self._options,
            window=self.model.context_window,
        )
        if request.prediction is not None:
            self.prediction = await self._serving.text.prediction(
                request.prediction.text,
                window=self.model.context_window,
                vocab_size=self.model.vocab_size,
            )
        if self.session is not None:
            self.context = await self._context(self.session, request, tokens, new)
            self._plan(request, [self.context.now.tokens])
        else:
            self._plan(request, [new])
        await self._classify()

    async def _answered_before(
        self, request: ChatRequest, session_ids: Sequence[str], *, branches: bool, whole: bool
    ) -> bool:
        """Whether a session's record has the answer to this very request, which is told again then.
        `branches`: it may be in a branch of the first session, where the messages are a whole conversation,
        or may be (`whole`). False: nothing is known of it; whoever begins the turn looks once more. Raises
        IdempotencyKeyReused, StoreUnavailable."""
        if self.key is None:
            return False
        if request.prompt_logprobs is not None:
            raise InvalidInput(
                "prompt_logprobs are not kept in a session, so the answer could not be given again: leave "
                "them, or the Idempotency-Key, out",
                param="prompt_logprobs",
            )
        self._admit()
        records = await whole_records(self._serving, self.tenant, session_ids)
        if records and branches and (whole or is_history((), messages_of(request))):
            of = root_of_branch(session_ids[0])
            heads = await branches_of(self._serving, self.tenant, of)
            others = [one for one in (of, *(head.session_id for head in heads)) if one not in session_ids]
            records += await whole_records(self._serving, self.tenant, others)
        for record in records:
            if self._tells_again(request, record):
                if branches and record.session_id not in session_ids:
                    self.branch = record.session_id
                return True
        return False

    def _tells_again(self, request: ChatRequest, record: SessionRecord) -> bool:
        """Whether the session has answered the request, which is told again from here on."""
        if self.key is None:
            return False
        replayed = replayed_turn(record, self.key, self._serving.text.tokenizer)
        if replayed is None:
            return False
        answered = replayed.answered
        self.replayed, self.turn, self.model = replayed, replayed.turn, replayed.model
        self.shown, self.context = [list(replayed.shown)], None
        self.turn_id, self.created_s = answered.turn_id, answered.created_s
        self.service = replace(self._asked(request), name=answered.service_tier)
        self.request, self.session_id = request, record.session_id
        return True

    def _admit(self) -> None:
        """Once a request."""
        if not self._admitted:
            self._serving.quotas.admit(self.tenant.name, self.received_s)
        self._admitted = True

    async def _compiled(self, grammar: tuple[str, str], request: ChatRequest | CompletionRequest) -> str:
        """As `compiled_grammar` does it."""
        return await compiled_grammar(grammar, request, self.tenant.name, self._serving.grammars)

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
            return await begin_turn(self._serving, self.tenant, named.id, self.turn_id)
        tools = ToolOffer(definitions=definitions_of(request)).record if request.tools or whole else None
        turn = GivenTurn(
            messages=given,
            tools=tools,
            shared=named.shared,
            whole=whole,
            head_changes=self.volatile.head_changes,
            model=self.model.name if named.shared else None,
        )
        of = self._serving, self.tenant, named, self.turn_id
        return await begin_in_branch(*of, turn, block_tokens=self.model.block_tokens)

    async def completion(self, request: CompletionRequest) -> None:
        self._admit()
        self.service = self._asked(request)
        self._grammar = await self._compiled(content_grammar(request), request)
        self.model = self._serving.fleet.model(request.model)
        prompts = await prompts_of(
            request, self._serving.text, self.model, choices_max=self._serving.config.max_choices
        )
        self._plan(request, prompts)
        await self._classify()

    @property
    def messages_after(self) -> int:
        """How many messages a session holds after this turn."""
        if self.replayed is not None:
            return self.replayed.messages
        stored = len(self.session.messages) if self.session is not None else 0
        return stored + len(self.new_messages) + 1

    @property
    def in_session(self) -> bool:
        """Whether the answer is in a session's record when it is complete."""
        return bool(self.session_id)

    @property
    def answered_context(self) -> Context | ReplayedContext | None:
        """Of a session."""
        return self.context if self.replayed is None else self.replayed.context

    async def _context(
        self, session: SessionTurn, request: ChatRequest, tokens: array[int], new: list[int]
    ) -> Context:
        """What the turn sees; a truncation with which it begins stays in `_truncation`."""
        model, config = self.model, self._serving.config
        stored = session.truncations
        if request.truncation == "auto" and tokens:
            dropped = sum(one.dropped_tokens for one in stored)
            head = stored[-1].head_tokens if stored else None
            if head is None:
                head = await self._serving.text.head_tokens(
                    session.messages, tokens, model.block_tokens, self.tools
                )
            self.truncation = truncation_for(
                kept_tokens=len(tokens) - dropped,
                dropped_tokens=dropped,
                head_tokens=head,
                new_tokens=len(new),
                answer_tokens=answer_tokens_of(max_tokens_of(request), model.context_window),
                window=model.context_window,
                ratio=config.truncation_ratio,
                block_tokens=model.block_tokens,
            )
        whole = tokens + token_array(new)
        context = self._context_with(session, whole)
        if len(context.excerpts) == 1:
            return context
        for name, asked in (("reuse", request.reuse is False), ("prompt_logprobs", _reads_prompt(request))):
            if asked:
                raise InvalidInput(
                    f"{name} cannot be had behind a truncation: the session's KV was computed with tokens "
                    "that are not in its context any more, and is not computed anew",
                    param=name,
                )
        fleet = self._serving.fleet.homed(self.home())
        found = await stored_of_excerpts(fleet, model, context.excerpts, timeout_s=config.request_deadline_s)
        if found is None:  # nothing is given up for a store that is slow to answer
            return context
        first, cost = replay_costs(context.excerpts, found)
        last = len(context.excerpts) - 1
        if first < last and cost > config.replay_max * len(context.now.tokens):
            self.truncation = recomputed(stored, self.truncation)
            context = self._context_with(session, whole)
            context.kv = "recomputed"
        return context

    def _context_with(self, session: SessionTurn, tokens: array[int]) -> Context:
        added = [self.truncation] if self.truncation is not None else []
        return Context(
            salt=self.tenant.salt,
            model=self.model,
            tokens=tokens,
            truncations=[*session.truncations, *added],
            known_ids=session.record.block_ids,
        )

    def _asked(self, request: ChatRequest | CompletionRequest) -> ServiceClass:
        return self._serving.classes.of(self.tenant.name, request.service_tier)

    def _plan(self, request: ChatRequest | CompletionRequest, prompts: Sequence[Sequence[int]]) -> None:
        config = self._serving.config
        self.request = request
        self.turn = plan_turn(
            request,
            prompts,
            model=self.model,
            text=self._serving.text,
            seed=self._serving.seed(),
            patience=Patience(resume_s=config.resume_deadline_s, stall_s=config.stall_s),
            choices_max=config.max_choices,
            capacity_tokens=self._serving.fleet.capacity_tokens(self.model),
            grammar=self._grammar,
            tools=self.tools,
            options=self._options,
        )
        self.shown = [[] for _ in self.turn.choices]
        self.reservation = self._serving.quotas.reserve(
            self.tenant.name, self.turn.usage.prompt_tokens, self._serving.clock()
        )

    async def abandon(self, session: SessionTurn) -> None:
        """Returns once the session is free for another turn, or a moment later in any case."""
        abandoned = self._serving.in_background(session.abandon())
        await asyncio.wait((abandoned,), timeout=_ABANDONED_S)

    def settle(self, reservation: TokenReservation) -> None:
        """A prompt of which no token came was not computed, as far as anybody knows."""
        usage = self.turn.usage
        begun = self.turn.first_token_s is not None
        reservation.settle(
            prompt=usage.prompt_tokens if begun else 0,
            cached=usage.cached_tokens if begun else 0,
            completion=usage.completion_tokens,
            now_s=self._serving.clock(),
        )

    def promise(self, service: ServiceClass) -> Promise:
        objective_s = service.objectives.ttft_s
        return Promise(
            tenant=self.tenant.name,
            ttft_s=math.inf if objective_s is None else objective_s,
            expected_s=self.prompt_s,
        )

    async def _classify(self) -> None:
        """Decides as which class the request is served. Raises Overloaded where the one that it asked for
        refuses it."""
        kept = 0
        if self.session is not None and self.context is not None:
            kept = len(self.session.record.tokens) - self.context.dropped_tokens
        self.prompt_s = self._prompt_seconds(kept)
        asked, fleet, ttft_s = self.service, self._serving.fleet, 0.0
        if asked.objectives.ttft_s is not None:
            ttft_s = self._expected_ttft_s()
            if self.session is None and not asked.meets(ttft_s):
                prefix = self.prefix()  # it was reckoned as if nothing of it were stored
                store, patience_s = fleet.homed(prefix.home), self._serving.config.request_deadline_s
                stored = await stored_blocks(
                    store, self.model, prefix.block_ids, timeout_s=patience_s, peek=True
                )
                self.prompt_s = self._prompt_seconds((stored or 0) * self.model.block_tokens)
                ttft_s = self._expected_ttft_s()
        token_s = fleet.token_seconds(self.model) if asked.objectives.tbt_s is not None else 0.0
        self.service = self._served(asked, ttft_s, token_s)

    @property
    def reads_prompt(self) -> bool:
        """Whether the answer says how likely the prompt's own tokens are, which is much to write."""
        return _reads_prompt(self.request)

    @property
    def _computes_all(self) -> bool:
        """Of a prompt, whatever is stored of it."""
        return self.request.reuse is False or self.reads_prompt

    def _prompt_seconds(self, stored_tokens: int) -> float:
        """What computing its prompts is expected to take, but for so many tokens of each."""
        first = 0 if self._computes_all else stored_tokens
        prompts = {id(choice.prompt): len(choice.prompt) for choice in self.turn.choices}
        fleet = self._serving.fleet
        return sum(fleet.prompt_seconds(self.model, range(first, tokens)) for tokens in prompts.values())

    def _expected_ttft_s(self) -> float:
        """From its arrival to its first token."""
        serving, seconds = self._serving, self.prompt_s
        wait_s = serving.admission.expected_wait_s(len(self.turn.choices), self.promise(self.service))
        ahead_s = serving.backlog.ahead_s(seconds, instances=serving.fleet.prefills(self.model))
        return serving.clock() - self.received_s + wait_s + ahead_s + seconds

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

    def prefix(self) -> Prefix:
        """Of the first prompt, where there are several."""
        if self._computes_all:
            return NO_PREFIX
        prompt, model = self.turn.choices[0].prompt, self.model
        reusable = reusable_blocks(len(prompt), model.block_tokens)
        if self.context is not None:
            ids = self.context.now.ids[:reusable]
            return Prefix(model=model.fingerprint, block_ids=ids, home=self.home())
        chain = IdentityChain(self.tenant.salt, model.fingerprint, model.block_tokens)
        chain.extend(prompt[: reusable * model.block_tokens])
        home = self.home() or b"".join(chain.ids[:1])
        return Prefix(model=model.fingerprint, block_ids=chain.ids, home=home)

    def home(self) -> bytes:
        """A session's blocks, and its forks', lie where that of its root is; without a session it is up to
        the prompt."""
        if self.session is None:
            return b""
        return session_key(self.tenant.name, self.session.record.root)


def _reads_prompt(request: ChatRequest | CompletionRequest) -> bool:
    return prompt_logprobs_of(request) is not None
