"""Spans by OTLP over gRPC. The one module that imports OpenTelemetry; `trace.Tracer.otlp` imports it when
needed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping

from opentelemetry import trace as api
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from kvcommons.telemetry.trace import Kind, Span, Value, split_traceparent

EXPORT_TIMEOUT_S = 2
FLUSH_MS = 2_000
QUEUE_SPANS_MAX = 4_096  # more are dropped: a slow collector never slows a service
_KINDS: Mapping[Kind, api.SpanKind] = {
    "server": api.SpanKind.SERVER,
    "client": api.SpanKind.CLIENT,
    "internal": api.SpanKind.INTERNAL,
}


class OtlpBackend:
    def __init__(self, endpoint: str, *, service: str, instance_id: str) -> None:
        resource = Resource.create(
            {"service.namespace": "kvcommons", "service.name": service, "service.instance.id": instance_id}
        )
        # The service ends the provider itself, within its drain; an atexit hook would wait a second time.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(
            endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=EXPORT_TIMEOUT_S
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=QUEUE_SPANS_MAX, schedule_delay_millis=500)
        )
        self._tracer = self._provider.get_tracer("kvcommons")

    @contextlib.contextmanager
    def span(self, name: str, parent: str, attributes: Mapping[str, Value], kind: Kind) -> Iterator[Span]:
        # An explicit context: the parent is ours to say, OpenTelemetry's own "current span" is not used.
        context = api.set_span_in_context(api.INVALID_SPAN)
        ids = split_traceparent(parent)
        if ids is not None:
            trace, span_id, flags = ids
            # Whoever records, records whole traces: a parent from a caller without an endpoint has the flag
            # off.
            flags |= api.TraceFlags.SAMPLED
            remote = api.SpanContext(trace, span_id, is_remote=True, trace_flags=api.TraceFlags(flags))
            context = api.set_span_in_context(api.NonRecordingSpan(remote))
        span = self._tracer.start_span(name, context=context, kind=_KINDS[kind], attributes=dict(attributes))
        made = _OtlpSpan(span)
        try:
            yield made
        except asyncio.CancelledError:
            if kind != "server":
                made.fail("cancelled", "cancelled before its end")
            raise
        except Exception as error:
            made.fail(getattr(error, "code", type(error).__name__), str(error))
            raise
        finally:
            span.end()

    def shutdown(self) -> None:
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()


class _OtlpSpan:
    __slots__ = ("_span", "traceparent")

    def __init__(self, span: api.Span) -> None:
        context = span.get_span_context()
        self._span = span
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def set(self, name: str, value: Value) -> None:
        self._span.set_attribute(name, value)

    def fail(self, code: str, message: str) -> None:
        self._span.set_status(api.Status(api.StatusCode.ERROR, message))
        self._span.set_attribute("error.type", code)
