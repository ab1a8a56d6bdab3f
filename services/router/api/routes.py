"""All paths in one table: the server and /openapi.json are made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel

from services.router.api import (
    chat,
    commons,
    completions,
    health,
    models,
    prefill,
    sessions,
    tokenizing,
    usage,
)
from services.router.api.body import AGENT_HEADERS, SESSION_HEADERS
from services.router.api.messages import answers as messages_answers
from services.router.api.messages import endpoints as messages
from services.router.api.messages import requests as messages_requests
from services.router.api.responses import answers as responses_answers
from services.router.api.responses import conversations
from services.router.api.responses import endpoints as responses
from services.router.api.responses import requests as responses_requests
from services.router.api.schemas import answers, requests
from services.router.api.schemas.answers import Error
from services.router.api.schemas.commons import CommonsPicture
from services.router.http.middleware import Handler


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    method: str
    path: str
    handler: Handler
    summary: str
    body: type[BaseModel] | None = None
    answers: Mapping[int, type[BaseModel]] = field(default_factory=dict)
    stream: type[BaseModel] | None = None  # each event, where the request asks for a stream
    done: bool = False  # the stream ends with [DONE]
    query: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()  # that name a session
    errors: tuple[int, ...] = (401,)
    retried: bool = False  # takes an Idempotency-Key
    operator: bool = False  # of the whole stack: a tenant's key is not enough
    error: type[BaseModel] = Error


_GENERATION_ERRORS = (400, 401, 403, 404, 409, 413, 429, 500, 503)
_RETRIED_ERRORS = (*_GENERATION_ERRORS, 422)
_MESSAGES_ERRORS = (400, 401, 403, 404, 409, 413, 429, 500, 504, 529)
_TOKENIZING_ERRORS = (400, 401, 404, 413, 503)
_SESSION_ERRORS = (400, 401, 404, 503)


def routes() -> list[Route]:
    return [
        *_generation(),
        *_responses(),
        *_messages(),
        *_tokenizing(),
        *_sessions(),
        *_documents(),
        *_operation(),
    ]


def _generation() -> list[Route]:
    return [
        Route(
            method="POST",
            path="/v1/chat/completions",
            handler=chat.chat_completions,
            summary="An answer to messages; with a session id, to all that was said before.",
            body=requests.ChatRequest,
            answers={200: answers.ChatCompletion},
            stream=answers.ChatCompletionChunk,
            done=True,
            headers=(*SESSION_HEADERS, *AGENT_HEADERS),
            errors=_RETRIED_ERRORS,
            retried=True,
        ),
        Route(
            method="POST",
            path="/v1/completions",
            handler=completions.completions,
            summary="Text that goes on from a prompt.",
            body=requests.CompletionRequest,
            answers={200: answers.Completion},
            stream=answers.Completion,
            done=True,
            errors=_RETRIED_ERRORS,
            retried=True,
        ),
        Route(
            method="GET",
            path="/v1/models",
            handler=models.list_models,
            summary="The models that are served.",
            answers={200: answers.ModelList},
        ),
        Route(
            method="GET",
            path="/v1/models/{id}",
            handler=models.get_model,
            summary="One model.",
            answers={200: answers.ModelCard},
            errors=(401, 404),
        ),
    ]


def _responses() -> list[Route]:
    return [
        Route(
            method="POST",
            path="/v1/responses",
            handler=responses.create_response,
            summary="An answer in OpenAI's newer shape, stored unless the request says otherwise.",
            body=responses_requests.ResponsesRequest,
            answers={200: responses_answers.Response},
            stream=responses_answers.ResponseEvent,
            headers=(*SESSION_HEADERS, *AGENT_HEADERS),
            errors=_RETRIED_ERRORS,
            retried=True,
        ),
        Route(
            method="POST",
            path="/v1/responses/input_tokens",
            handler=responses.count_input_tokens,
            summary="How many tokens such a request's prompt has.",
            body=responses_requests.InputTokensRequest,
            answers={200: responses_answers.InputTokens},
            errors=_SESSION_ERRORS,
        ),
        Route(
            method="GET",
            path="/v1/responses/{id}",
            handler=responses.get_response,
            summary="A stored response.",
            answers={200: responses_answers.Response},
            errors=_SESSION_ERRORS,
        ),
        Route(
            method="POST",
            path="/v1/conversations",
            handler=conversations.create_conversation,
            summary="A new conversation: a session that responses go on with.",
            body=responses_requests.ConversationCreate,
            answers={200: responses_answers.Conversation},
            errors=_SESSION_ERRORS,
        ),
        Route(
            method="GET",
            path="/v1/conversations/{id}",
            handler=conversations.get_conversation,
            summary="A conversation.",
            answers={200: responses_answers.Conversation},
            errors=_SESSION_ERRORS,
        ),
        Route(
            method="DELETE",
            path="/v1/conversations/{id}",
            handler=conversations.delete_conversation,
            summary="Forgets a conversation.",
            answers={200: responses_answers.ConversationDeleted},
            errors=(*_SESSION_ERRORS, 409),
        ),
        Route(
            method="GET",
            path="/v1/conversations/{id}/items",
            handler=conversations.list_items,
            summary="What was said in a conversation, newest first.",
            answers={200: responses_answers.ItemList},
            query=("limit", "after", "order"),
            errors=_SESSION_ERRORS,
        ),
        Route(
            method="GET",
            path="/v1/conversations/{id}/items/{item}",
            handler=conversations.get_item,
            summary="One thing that was said.",
            answers={200: responses_answers.ConversationItem},
            errors=_SESSION_ERRORS,
        ),
    ]


def _messages() -> list[Route]:
    return [
        Route(
            method="POST",
            path="/v1/messages",
            handler=messages.create_message,
            summary="An answer as Anthropic's API gives it.",
            body=messages_requests.MessagesRequest,
            answers={200: messages_answers.MessagesAnswer},
            stream=messages_answers.MessagesEvent,
            headers=(*SESSION_HEADERS, *AGENT_HEADERS),
            errors=(*_MESSAGES_ERRORS, 422),
            retried=True,
            error=messages_answers.MessagesError,
        ),
        Route(
            method="POST",
            path="/v1/messages/count_tokens",
            handler=messages.count_tokens,
            summary="How many tokens such a request's prompt has.",
            body=messages_requests.TokenCountRequest,
            answers={200: messages_answers.TokenCount},
            errors=_MESSAGES_ERRORS,
            error=messages_answers.MessagesError,
        ),
    ]


def _tokenizing() -> list[Route]:
    return [
        Route(
            method="POST",
            path="/tokenize",
            handler=tokenizing.tokenize,
            summary="The tokens of a prompt, or of messages, as vLLM gives them.",
            body=tokenizing.TokenizeRequest,
            answers={200: tokenizing.Tokenized},
            errors=_TOKENIZING_ERRORS,
        ),
        Route(
            method="POST",
            path="/detokenize",
            handler=tokenizing.detokenize,
            summary="The text of tokens.",
            body=tokenizing.DetokenizeRequest,
            answers={200: tokenizing.Detokenized},
            errors=_TOKENIZING_ERRORS,
        ),
    ]


def _sessions() -> list[Route]:
    return [
        Route(
            method="POST",
            path="/v1/sessions",
            handler=sessions.create_session,
            summary="A new session; a chat with an unused session id begins one too.",
            body=requests.SessionCreate,
            answers={201: answers.Session},
            errors=(400, 401, 409, 413, 503),
        ),
        Route(
            method="GET",
            path="/v1/sessions",
            handler=sessions.list_sessions,
            summary="The tenant's sessions, by id.",
            answers={200: answers.SessionList},
            query=("limit", "after"),
            errors=(400, 401, 503),
        ),
        Route(
            method="GET",
            path="/v1/sessions/{id}",
            handler=sessions.get_session,
            summary="A session: its messages, tokens, and the tiers its blocks lie in.",
            answers={200: answers.SessionDetail},
            errors=_SESSION_ERRORS,
        ),
        Route(
            method="POST",
            path="/v1/sessions/{id}/fork",
            handler=sessions.fork_session,
            summary="A new session that goes on from here; the KV is shared.",
            body=requests.SessionFork,
            answers={201: answers.Session},
            errors=(*_SESSION_ERRORS, 409),
        ),
        Route(
            method="GET",
            path="/v1/sessions/{id}/branches",
            handler=sessions.list_branches,
            summary="The session's branches: where a history departed, or a fork at a cut.",
            answers={200: answers.SessionBranches},
            errors=_SESSION_ERRORS,
        ),
        Route(
            method="DELETE",
            path="/v1/sessions/{id}",
            handler=sessions.delete_session,
            summary="Forgets a session, and its branches.",
            answers={200: answers.SessionDeleted},
            errors=(*_SESSION_ERRORS, 409),
        ),
    ]


def _documents() -> list[Route]:
    path, state = "/v1/sessions/{id}/prefill", answers.SessionPrefillState
    return [
        Route(
            method="POST",
            path=path,
            handler=prefill.begin_prefill,
            summary="A document becomes the session's context in the background, to chat on afterwards.",
            body=requests.SessionPrefill,
            answers={202: state},
            stream=state,
            done=True,
            errors=_GENERATION_ERRORS,
        ),
        Route(
            method="GET",
            path=path,
            handler=prefill.get_prefill,
            summary="How far the session's document is, or what became of it.",
            answers={200: state},
            stream=state,
            done=True,
            query=("stream",),
            errors=_SESSION_ERRORS,
        ),
        Route(
            method="DELETE",
            path=path,
            handler=prefill.cancel_prefill,
            summary="Ends the document under way: the session stays as it was before.",
            answers={200: state},
            errors=_SESSION_ERRORS,
        ),
    ]


def _operation() -> list[Route]:
    return [
        Route(
            method="GET",
            path="/v1/usage",
            handler=usage.usage,
            summary="What the key's tenant has used at this router, and what it may.",
            answers={200: answers.Usage},
        ),
        Route(
            method="GET",
            path="/health",
            handler=health.health,
            summary="200 when all is served. The one path that needs no key.",
            answers={200: answers.Health, 503: answers.Health},
            errors=(),
        ),
        Route(
            method="GET",
            path="/version",
            handler=health.version,
            summary="Of this server.",
            answers={200: answers.Version},
        ),
        Route(
            method="GET",
            path="/metrics",
            handler=health.metrics,
            summary="Prometheus metrics, as text. Needs an operator's key where keys are configured.",
            errors=(401, 403),
            operator=True,
        ),
        Route(
            method="GET",
            path="/v1/status",
            handler=health.status,
            summary="Instances, loads, store and queue. Needs an operator's key where keys are configured.",
            answers={200: answers.Status},
            errors=(401, 403),
            operator=True,
        ),
        Route(
            method="GET",
            path="/v1/commons",
            handler=commons.commons,
            summary="Where KV lies, who lends to whom, and what is under way; as a stream, twice a second. "
            "Needs an operator's key where keys are configured.",
            answers={200: CommonsPicture},
            stream=CommonsPicture,
            done=True,
            query=("stream",),
            errors=(400, 401, 403, 429),
            operator=True,
        ),
    ]
