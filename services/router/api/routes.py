"""All paths in one table: the server and /openapi.json are made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aiohttp import web
from pydantic import BaseModel

from kvcommons.errors import UnsupportedParameter
from services.router.api import chat, completions, health, models, prefill, sessions, tokenizing
from services.router.api.schemas import answers, requests
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
    query: tuple[str, ...] = ()
    errors: tuple[int, ...] = (401,)


_GENERATION_ERRORS = (400, 401, 403, 404, 409, 413, 429, 500, 503)
_TOKENIZING_ERRORS = (400, 401, 404, 413, 503)
_SESSION_ERRORS = (400, 401, 404, 503)


def routes() -> list[Route]:
    return [*_generation(), *_tokenizing(), *_sessions(), *_documents(), *_operation()]


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
            errors=_GENERATION_ERRORS,
        ),
        Route(
            method="POST",
            path="/v1/completions",
            handler=completions.completions,
            summary="Text that goes on from a prompt.",
            body=requests.CompletionRequest,
            answers={200: answers.Completion},
            stream=answers.Completion,
            errors=_GENERATION_ERRORS,
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
            method="DELETE",
            path="/v1/sessions/{id}",
            handler=sessions.delete_session,
            summary="Forgets a session.",
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
            errors=_GENERATION_ERRORS,
        ),
        Route(
            method="GET",
            path=path,
            handler=prefill.get_prefill,
            summary="How far the session's document is, or what became of it.",
            answers={200: state},
            stream=state,
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
            summary="Prometheus metrics, as text. Needs a key where keys are configured.",
        ),
        Route(
            method="GET",
            path="/v1/status",
            handler=health.status,
            summary="Instances, loads, store and queue.",
            answers={200: answers.Status},
        ),
    ]


async def unbuilt(request: web.Request) -> web.Response:
    """Answers paths that OpenAI's API has and this server has not built: a clear error instead of a 404."""
    path = request.path[:80]
    raise UnsupportedParameter(
        f"{path} is not built yet: use /v1/chat/completions with session_id, which keeps the conversation",
        param=path,
    )
