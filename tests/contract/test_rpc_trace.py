"""Spans of two processes' worth of RPC arrive at an OTLP collector as one trace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from kvcommons.errors import Conflict
from kvcommons.pb import ledger_pb2 as pb
from kvcommons.pb import ledger_pb2_grpc as rpc
from kvcommons.rpc.channel import open_channel
from kvcommons.rpc.server import RpcServer
from kvcommons.telemetry.metrics import new_registry
from kvcommons.telemetry.telemetry import Telemetry
from kvcommons.telemetry.trace import CONVERSATION_ID, USAGE_INPUT_TOKENS, Kind, Tracer
from tests.machine import scaled


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: dict[str, trace_pb2.Span] = {}
        self.services: set[str] = set()

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            names = {item.key: item.value.string_value for item in resource.resource.attributes}
            self.services.add(names["service.name"])
            for scope in resource.scope_spans:
                self.spans.update((span.name, span) for span in scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
async def collector() -> AsyncIterator[tuple[str, Collector]]:
    server = grpc.aio.server()
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"http://127.0.0.1:{port}", collector
    await server.stop(0)


class Refusing(rpc.LedgerServicer):
    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatReply:
        raise Conflict("no")


async def test_one_trace_over_services(collector: tuple[str, Collector]) -> None:
    endpoint, collected = collector
    caller = Tracer.otlp(endpoint, service="router", instance_id="router-1")
    callee = Tracer.otlp(endpoint, service="ledger", instance_id="ledger-1")
    server = RpcServer(
        "127.0.0.1:0",
        Telemetry(service="ledger", instance_id="ledger-1", registry=new_registry(), tracer=callee),
    )
    server.add(rpc.add_LedgerServicer_to_server, Refusing())
    await server.start()
    channel = open_channel(server.address)
    # A client that does not record asks for a trace of its own id.
    client = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
    try:
        with caller.span("turn", parent=client, attributes={CONVERSATION_ID: "s1"}, kind="client") as turn:
            turn.set(USAGE_INPUT_TOKENS, 12)
            with pytest.raises(Conflict):
                await rpc.LedgerStub(channel).Heartbeat(pb.HeartbeatRequest(), timeout=scaled(5))
            # On another thread the parent is passed.
            await asyncio.to_thread(_on_a_thread, caller, turn.traceparent)
    finally:
        await channel.close(None)
        await server.drain(0)
    await asyncio.to_thread(caller.shutdown)
    await asyncio.to_thread(callee.shutdown)
    spans = collected.spans
    assert set(spans) == {"turn", "kvcommons.v1.Ledger/Heartbeat", "load"}
    assert collected.services == {"router", "ledger"}
    turn_span, call, load = spans["turn"], spans["kvcommons.v1.Ledger/Heartbeat"], spans["load"]
    assert turn_span.trace_id.hex() == client[3:35]
    assert turn_span.parent_span_id.hex() == client[36:52]
    assert call.trace_id == load.trace_id == turn_span.trace_id
    assert call.parent_span_id == load.parent_span_id == turn_span.span_id
    assert call.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    assert {item.key: item.value.string_value for item in call.attributes}["error.type"] == "conflict"
    kinds = trace_pb2.Span.SpanKind
    assert turn_span.kind == kinds.SPAN_KIND_CLIENT
    assert (call.kind, load.kind) == (kinds.SPAN_KIND_SERVER, kinds.SPAN_KIND_INTERNAL)
    attributes = {item.key: item.value for item in turn_span.attributes}
    assert attributes[CONVERSATION_ID].string_value == "s1"
    assert attributes[USAGE_INPUT_TOKENS].int_value == 12


def _on_a_thread(tracer: Tracer, parent: str) -> None:
    with tracer.span("load", parent=parent):
        pass


async def test_a_cancelled_span_failed_unless_it_answered(collector: tuple[str, Collector]) -> None:
    endpoint, collected = collector
    tracer = Tracer.otlp(endpoint, service="router", instance_id="router-1")

    async def work(name: str, kind: Kind) -> None:
        with tracer.span(name, kind=kind):
            await asyncio.Event().wait()

    kinds: tuple[Kind, ...] = ("client", "internal", "server")
    tasks = [asyncio.create_task(work(kind, kind)) for kind in kinds]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    with tracer.span("told") as told:
        told.fail("unavailable", "gone")
    await asyncio.to_thread(tracer.shutdown)
    status = trace_pb2.Status
    failed = {name for name, span in collected.spans.items() if span.status.code == status.STATUS_CODE_ERROR}
    assert failed == {"client", "internal", "told"}
    assert set(collected.spans) == {*kinds, "told"}
    reasons = {name: collected.spans[name].attributes[0].value.string_value for name in failed}
    assert reasons == {"client": "cancelled", "internal": "cancelled", "told": "unavailable"}
    assert collected.spans["told"].status.message == "gone"


async def test_a_collector_that_is_away_delays_nothing_for_long() -> None:
    tracer = Tracer.otlp("http://127.0.0.1:9", service="router", instance_id="router-1")
    loop = asyncio.get_running_loop()
    began = loop.time()
    for _ in range(1000):
        with tracer.span("turn"):
            pass
    assert loop.time() - began < scaled(10.0), (
        "a span waits for nobody: one export alone may take two seconds"
    )
    await asyncio.to_thread(tracer.shutdown)
    assert loop.time() - began < scaled(8.0)
