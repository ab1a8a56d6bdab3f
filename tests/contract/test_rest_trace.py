"""What the router's spans say of a request's end, at an OTLP collector."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcommons.errors import InvalidInput
from kvcommons.telemetry.metrics import new_registry
from kvcommons.telemetry.telemetry import Telemetry
from kvcommons.telemetry.trace import Tracer
from tests.contract.rest_stack import KvStore, Stack, stack
from tests.system.collector import Collector, Span
from tests.waiting import eventually

pytest_plugins = ("tests.contract.rest_fixtures",)

CHAT = "/v1/chat/completions"
ROOT, INNER = f"POST {CHAT}", "chat demo"


def ask(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "go"}], **more}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture
async def traced(socket_folder: Path, rest_store: KvStore, collector: Collector) -> AsyncIterator[Stack]:
    tracer = Tracer.otlp(collector.endpoint, service="router", instance_id="router-1")
    telemetry = Telemetry(service="router", instance_id="router-1", registry=new_registry(), tracer=tracer)
    async with stack(socket_folder, rest_store, telemetry=telemetry) as served:
        await served.show()
        yield served
    await asyncio.to_thread(tracer.shutdown)


async def spans(collector: Collector, root: str = ROOT, inner: str = INNER) -> dict[str, Span]:
    """Those of the one request for an answer."""

    def both() -> bool:
        return {root, inner} <= {span.name for span in collector.spans}

    await eventually(both)
    return {span.name: span for span in collector.spans if span.name in (root, inner)}


def facts(span: Span) -> tuple[str, bool, str | None]:
    return span.kind, span.failed, span.attributes.get("error.type")


async def test_an_answer_is_no_failure(traced: Stack, collector: Collector) -> None:
    traced.says("hello")
    async with traced.http.post(CHAT, json=ask(stream=True)) as response:
        assert (await response.read()).endswith(b"[DONE]\n\n")
    found = await spans(collector)
    assert facts(found[ROOT]) == ("server", False, None)
    assert facts(found[INNER]) == ("client", False, None)
    assert found[INNER].parent_id == found[ROOT].span_id


# Of each API: a request, what OpenTelemetry calls it, and where its answer counts tokens.
APIS: dict[str, tuple[dict[str, Any], str, tuple[str, str]]] = {
    CHAT: (ask(max_tokens=9), "chat", ("prompt_tokens", "completion_tokens")),
    "/v1/completions": (
        {"prompt": "go", "max_tokens": 9}, "text_completion", ("prompt_tokens", "completion_tokens"),
    ),
    "/v1/responses": ({"input": "go", "max_output_tokens": 9}, "chat", ("input_tokens", "output_tokens")),
    "/v1/messages": (ask(model="demo", max_tokens=9), "chat", ("input_tokens", "output_tokens")),
}  # fmt: skip


@pytest.mark.parametrize("path", APIS)
async def test_a_requests_span_says_the_same_of_every_api(
    traced: Stack, collector: Collector, path: str
) -> None:
    body, operation, counts = APIS[path]
    (answer,) = traced.says("hello")
    status, reply = await traced.post(path, body | {"temperature": 0.5})
    assert status == 200, reply
    root, inner = f"POST {path}", f"{operation} demo"
    found = await spans(collector, root, inner)
    assert (facts(found[root]), found[inner].parent_id) == (("server", False, None), found[root].span_id)
    reported = found[inner].attributes
    usage = tuple(reported[f"gen_ai.usage.{name}_tokens"] for name in ("input", "output"))
    assert usage == tuple(reply["usage"][name] for name in counts)
    assert usage == (len(traced.engines[0].decode.jobs[0].tokens), len(answer))
    expected = {
        "operation.name": operation, "provider.name": "kvcommons", "request.model": "demo",
        "response.model": "demo", "request.max_tokens": 9, "request.temperature": 0.5,
        "response.finish_reasons": ["stop"], "usage.cache_read.input_tokens": 0,
    }  # fmt: skip
    assert {name: reported[f"gen_ai.{name}"] for name in expected} == expected


async def test_a_stream_that_breaks_off_failed_though_it_began_well(
    traced: Stack, collector: Collector
) -> None:
    traced.says("one two three four five")
    traced.script.fail_at = {3: InvalidInput("no such thing")}
    async with traced.http.post(CHAT, json=ask(stream=True)) as response:
        assert response.status == 200
        assert b"no such thing" in await response.read()
    found = await spans(collector)
    assert facts(found[ROOT]) == ("server", True, "invalid_value")
    assert facts(found[INNER]) == ("client", True, "invalid_value")
    assert found[ROOT].attributes["http.response.status_code"] == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_left_cancelled_its_request(
    traced: Stack, collector: Collector, stream: bool
) -> None:
    traced.says("word " * 1000)
    traced.script.delay_s = 0.05
    call = asyncio.create_task(traced.http.post(CHAT, json=ask(stream=stream)))
    await eventually(lambda: traced.calls > 0)
    call.cancel()
    await asyncio.wait((call,))
    if not call.cancelled():
        call.result().close()
    found = await spans(collector)
    assert facts(found[ROOT]) == ("server", True, "cancelled")
    assert facts(found[INNER]) == ("client", True, "cancelled")


async def test_the_clients_mistakes_are_no_failure_of_the_server(traced: Stack, collector: Collector) -> None:
    traced.says("hello")
    traced.script.reserve_error = InvalidInput("no such thing", param="logit_bias")
    traced.script.reserve_errors = 1
    assert (await traced.post(CHAT, ask()))[0] == 400
    found = await spans(collector)
    assert facts(found[ROOT]) == ("server", False, None)
    assert facts(found[INNER]) == ("client", True, "invalid_value")
