"""An OTLP collector: takes spans over gRPC, as a real one does, and keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

STOP_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str  # empty: the first of its trace
    start_ns: int  # since the epoch
    end_ns: int
    failed: bool
    message: str  # of what failed
    kind: str  # "server", "client", "internal"
    attributes: dict[str, Any] = field(hash=False)

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens for as long as the context lasts; `spans` has what came so far."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(1))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.endpoint = f"http://127.0.0.1:{port}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait(STOP_S)

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            service = _attributes(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [_span(service, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


def _span(service: str, span: trace_pb2.Span) -> Span:
    return Span(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        message=span.status.message,
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        attributes=_attributes(span.attributes),
    )


def _attributes(pairs: Sequence[common_pb2.KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind) if kind else None
