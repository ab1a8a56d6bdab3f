from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from kvcommons.telemetry.metrics import (
    CallMetrics,
    LoadMetrics,
    MetricsListener,
    RequestMetrics,
    new_registry,
)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_the_names_that_vllm_users_know() -> None:
    registry = new_registry()
    requests = RequestMetrics(registry, "demo")
    running = 3
    LoadMetrics(
        registry, "demo", running=lambda: running, waiting=lambda: 1, kv_cache_usage=lambda: 0.25,
        prediction_error=lambda: 0.07,
    )  # fmt: skip
    requests.time_to_first_token_s.observe(0.03)
    requests.inter_token_latency_s.observe(0.01)
    requests.e2e_request_latency_s.observe(1.0)
    requests.prompt_tokens.inc(10)
    requests.generation_tokens.inc(4)
    requests.prefix_cache_queries.inc(10)
    requests.prefix_cache_hits.inc(8)
    requests.succeeded("stop")
    for name, expected in {
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": 1,
        "e2e_request_latency_seconds_sum": 1.0,
        "prompt_tokens_total": 10,
        "generation_tokens_total": 4,
        "prefix_cache_queries_total": 10,
        "prefix_cache_hits_total": 8,
        "num_requests_running": 3,
        "num_requests_waiting": 1,
        "kv_cache_usage_perc": 0.25,
        "iteration_prediction_error_ratio": 0.07,
    }.items():
        assert value(registry, f"kvcommons_{name}", model_name="demo") == expected, name
    name = "kvcommons_request_success_total"
    assert value(registry, name, model_name="demo", finished_reason="stop") == 1
    running = 5
    assert value(registry, "kvcommons_num_requests_running", model_name="demo") == 5
    assert (value(registry, "process_resident_memory_bytes") or 0) > 1e6


def test_calls_are_counted_by_code() -> None:
    registry = CollectorRegistry()
    calls = CallMetrics(registry)
    calls.ended("/m", "ok", 0.02)
    calls.ended("/m", "unavailable", 0.02)
    assert value(registry, "kvcommons_rpc_calls_total", method="/m", code="ok") == 1
    assert value(registry, "kvcommons_rpc_call_seconds_count", method="/m", code="unavailable") == 1


async def ask(address: str, request: bytes) -> tuple[bytes, bytes]:
    if address.startswith("unix:"):
        reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
    else:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return head, body


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_the_listener_answers_scrapes(kind: str, tmp_path: Path) -> None:
    registry = CollectorRegistry()
    Counter("kvcommons_things_total", "Things.", registry=registry).inc(2)
    listener = MetricsListener(f"unix:{tmp_path}/m.sock" if kind == "unix" else "127.0.0.1:0", registry)
    await listener.start()
    try:
        head, body = await ask(listener.address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        families = {family.name: family for family in text_string_to_metric_families(body.decode())}
        assert families["kvcommons_things"].samples[0].value == 2
        head, _ = await ask(listener.address, b"GET /else HTTP/1.1\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 404")
        head, _ = await ask(listener.address, b"POST /metrics HTTP/1.1\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 405")
        # More than a request line and headers may hold: closed without an answer, and the listener lives on.
        assert await ask(listener.address, b"x" * 100_000) == (b"", b"")
        head, _ = await ask(listener.address, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
    finally:
        await listener.stop()
