"""Traces: one per request over all services, W3C `traceparent` on the wire.

`Tracer.span` is a context manager that works on any thread and in any task. Without an OTLP endpoint nothing
is recorded and OpenTelemetry is never imported; ids are made and passed on all the same, so that the logs of
all services can be joined by trace id.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Literal, Protocol

# Span attributes: OpenTelemetry's names for generative AI.
CONVERSATION_ID = "gen_ai.conversation.id"
OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_SEED = "gen_ai.request.seed"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
USAGE_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"

Value = str | int | float | bool | Sequence[str]
# What a span is to the one around it, as OpenTelemetry has it: the answer to another process, a call to
# others, or a part of the work of its own process.
Kind = Literal["server", "client", "internal"]

_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_current: ContextVar[str] = ContextVar("kvcommons_traceparent", default="")


def current_traceparent() -> str:
    """Of the innermost span in this task or thread; empty outside of all spans."""
    return _current.get()


def trace_id(traceparent: str) -> str:
    """The 32 hex digits that all spans of a request share; empty where there is no valid `traceparent`."""
    match = _TRACEPARENT.fullmatch(traceparent)
    return match[1] if match else ""


class Span(Protocol):
    @property
    def traceparent(self) -> str:
        """What goes out to the next service: gRPC metadata, `DataRequest.traceparent`."""

    def set(self, name: str, value: Value) -> None:
        """Adds an attribute."""

    def fail(self, code: str, message: str) -> None:
        """Marks it failed, where no exception leaves its body. `code` as in `KVCommonsError.code`."""


class _Backend(Protocol):
    def span(
        self, name: str, parent: str, attributes: Mapping[str, Value], kind: Kind
    ) -> contextlib.AbstractContextManager[Span]: ...

    def shutdown(self) -> None: ...


class Tracer:
    """Makes spans. `Tracer.off()` passes ids on; `Tracer.otlp(...)` records, too."""

    def __init__(self, backend: _Backend | None) -> None:
        self._backend = backend

    @classmethod
    def off(cls) -> Tracer:
        return cls(None)

    @classmethod
    def otlp(cls, endpoint: str, *, service: str, instance_id: str) -> Tracer:
        """Sends spans to `endpoint` ("http://host:4317") in batches, from a thread of its own."""
        # Imported here: 20 MB that a process without an endpoint does not pay.
        from kvcommons.telemetry.otlp import OtlpBackend

        return cls(OtlpBackend(endpoint, service=service, instance_id=instance_id))

    @contextlib.contextmanager
    def span(
        self,
        name: str,
        *,
        parent: str | None = None,
        attributes: Mapping[str, Value] | None = None,
        kind: Kind = "internal",
    ) -> Iterator[Span]:
        """A span around the body. `parent` is a traceparent; None takes the innermost span of this task or
        thread (a new thread has none: pass it), an empty or invalid one begins a trace.

        An exception marks it failed, and so does a cancellation, unless it is a server's: who takes a
        question back is the one to say whether that is a failure.
        """
        known = _current.get() if parent is None else parent
        known = known if trace_id(known) else ""
        if self._backend is None:
            yield from self._within(_PassingSpan(known or _new_traceparent()))
            return
        with self._backend.span(name, known, attributes or {}, kind) as span:
            yield from self._within(span)

    def shutdown(self) -> None:
        """Sends what is buffered, for a bounded time."""
        if self._backend is not None:
            self._backend.shutdown()

    @staticmethod
    def _within(span: Span) -> Iterator[Span]:
        token = _current.set(span.traceparent)
        try:
            yield span
        finally:
            # An async generator may be closed in another context than the one it ran in, which is gone then.
            with contextlib.suppress(ValueError):
                _current.reset(token)


class _PassingSpan:
    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def set(self, name: str, value: Value) -> None:
        """Nothing is recorded."""

    def fail(self, code: str, message: str) -> None:
        """Nothing is recorded."""


def _new_traceparent() -> str:
    """Of a trace that nobody records: the sampled flag is off."""
    return f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-00"


def split_traceparent(traceparent: str) -> tuple[int, int, int] | None:
    """(trace id, span id, flags) as numbers; None where it is not valid."""
    match = _TRACEPARENT.fullmatch(traceparent)
    return (int(match[1], 16), int(match[2], 16), int(match[3], 16)) if match else None
