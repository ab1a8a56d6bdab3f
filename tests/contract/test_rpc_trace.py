"""Spans of two processes' worth of RPC arrive at an OTLP collector as one trace."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from kvcommons.errors import Conflict
from kvcommons.pb import ledger_pb2 as pb
from kvcommons.pb import ledger_pb2_grpc as rpc
from kvcommons.rpc.channel import open_channel
from kvcommons.rpc.server import RpcServer
from kvcommons.telemetry.metrics import new_registry
from kvcommons.telemetry.telemetry import Telemetry
from kvcommons.telemetry.trace import CONVERSATION_ID, USAGE_INPUT_TOKENS, Kind, Tracer
from tests.machine import scaled
from tests.system.collector import Collector


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as listening:
        yield listening


class Refusing(rpc.LedgerServicer):
    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatReply:
        raise Conflict("no")


async def test_one_trace_over_services(collector: Collector) -> None:
    caller = Tracer.otlp(collector.endpoint, service="router", instance_id="router-1")
    callee = Tracer.otlp(collector.endpoint, service="ledger", instance_id="ledger-1")
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
    spans = {span.name: span for span in collector.spans}
    assert set(spans) == {"turn", "kvcommons.v1.Ledger/Heartbeat", "load"}
    assert {span.service for span in collector.spans} == {"router", "ledger"}
    turn_span, call, load = spans["turn"], spans["kvcommons.v1.Ledger/Heartbeat"], spans["load"]
    assert turn_span.trace_id == client[3:35]
    assert turn_span.parent_id == client[36:52]
    assert call.trace_id == load.trace_id == turn_span.trace_id
    assert call.parent_id == load.parent_id == turn_span.span_id
    assert call.failed
    assert call.attributes["error.type"] == "conflict"
    assert (turn_span.kind, call.kind, load.kind) == ("client", "server", "internal")
    assert turn_span.attributes[CONVERSATION_ID] == "s1"
    assert turn_span.attributes[USAGE_INPUT_TOKENS] == 12


def _on_a_thread(tracer: Tracer, parent: str) -> None:
    with tracer.span("load", parent=parent):
        pass


async def test_a_cancelled_span_failed_unless_it_answered(collector: Collector) -> None:
    tracer = Tracer.otlp(collector.endpoint, service="router", instance_id="router-1")

    async def work(name: str, kind: Kind) -> None:
        with tracer.span(name, kind=kind):
            await asyncio.Event().wait()

    kinds: tuple[Kind, ...] = ("client", "internal", "server")
    tasks = [asyncio.create_task(work(kind, kind)) for kind in kinds]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    with tracer.span("told") as reported:
        reported.fail("unavailable", "gone")
    await asyncio.to_thread(tracer.shutdown)
    spans = {span.name: span for span in collector.spans}
    assert set(spans) == {*kinds, "told"}
    reasons = {name: span.attributes["error.type"] for name, span in spans.items() if span.failed}
    assert reasons == {"client": "cancelled", "internal": "cancelled", "told": "unavailable"}
    assert spans["told"].message == "gone"


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
