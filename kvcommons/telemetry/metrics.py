"""Prometheus metrics: prefix `kvcommons_`, then the suffixes that vLLM's users know.

Each process has one registry, passed in. A service declares its own metrics with `kvcommons_` names beside
these. Here are the ones that several services have: a metric's name and labels are said once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

log = logging.getLogger(__name__)

# Seconds. From a cached first token on a small model to a long prompt on two cores.
TTFT_BUCKETS = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5,
    0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
)
REQUEST_BUCKETS = (
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    60.0,
    120.0,
    240.0,
    480.0,
)
CALL_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
LENGTH_BUCKETS = (1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

READ_TIMEOUT_S = 5.0
REQUEST_BYTES_MAX = 8192


def new_registry() -> CollectorRegistry:
    """With the memory, CPU time and open files of this process (`process_*`)."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


class RequestMetrics:
    """Of the service that speaks to clients: what a request waited for, used and ended with."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"kvcommons_{name}", text, ["model_name"], registry=registry, buckets=buckets)
            return family.labels(model_name)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"kvcommons_{name}", text, ["model_name"], registry=registry).labels(model_name)

        self.time_to_first_token_s = histogram(
            "time_to_first_token_seconds", "From a request to its first token.", TTFT_BUCKETS
        )
        self.inter_token_latency_s = histogram(
            "inter_token_latency_seconds", "Between tokens of one choice.", TOKEN_BUCKETS
        )
        self.e2e_request_latency_s = histogram(
            "e2e_request_latency_seconds", "From a request to its end.", REQUEST_BUCKETS
        )
        self.request_queue_time_s = histogram(
            "request_queue_time_seconds", "In the router's queue.", TTFT_BUCKETS
        )
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Tokens of a prompt.", LENGTH_BUCKETS)
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Tokens of an answer.", LENGTH_BUCKETS
        )
        self.prompt_tokens = counter("prompt_tokens_total", "Tokens of all prompts.")
        self.generation_tokens = counter("generation_tokens_total", "Tokens of all answers.")
        self.prefix_cache_queries = counter(
            "prefix_cache_queries_total", "Prompt tokens looked up in any tier."
        )
        self.prefix_cache_hits = counter("prefix_cache_hits_total", "Prompt tokens whose KV was found.")
        self._success = Counter(
            "kvcommons_request_success_total",
            "Requests that ended well.",
            ["model_name", "finished_reason"],
            registry=registry,
        )
        self._model_name = model_name

    def succeeded(self, finished_reason: str) -> None:
        """`finished_reason` as the client sees it: "stop", "length"."""
        self._success.labels(self._model_name, finished_reason).inc()


class LoadMetrics:
    """Of the services that queue or run requests. The gauges read what they are given at each scrape."""

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        *,
        running: Callable[[], float],
        waiting: Callable[[], float],
        kv_cache_usage: Callable[[], float] | None = None,
        prediction_error: Callable[[], float] | None = None,
    ) -> None:
        def gauge(name: str, text: str, read: Callable[[], float]) -> None:
            Gauge(f"kvcommons_{name}", text, ["model_name"], registry=registry).labels(
                model_name
            ).set_function(read)

        gauge("num_requests_running", "Requests under way.", running)
        gauge("num_requests_waiting", "Requests queued.", waiting)
        if kv_cache_usage is not None:
            gauge("kv_cache_usage_perc", "Share of KV blocks that sequences use, 0 to 1.", kv_cache_usage)
        if prediction_error is not None:
            gauge(
                "iteration_prediction_error_ratio",
                "Mean absolute error of what iterations were expected to take, 0 to 1.",
                prediction_error,
            )


class CallMetrics:
    """Of every RPC server, by method and by the code it ended with."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._count = Counter(
            "kvcommons_rpc_calls_total", "Calls answered.", ["method", "code"], registry=registry
        )
        self._seconds = Histogram(
            "kvcommons_rpc_call_seconds",
            "From a call's receipt to its end.",
            ["method", "code"],
            registry=registry,
            buckets=CALL_BUCKETS,
        )

    def ended(self, method: str, code: str, seconds: float) -> None:
        self._count.labels(method, code).inc()
        self._seconds.labels(method, code).observe(seconds)


class MetricsListener:
    """Answers `GET /metrics` on "host:port" or "unix:/path"; one connection, one answer."""

    def __init__(self, address: str, registry: CollectorRegistry) -> None:
        self._wanted = address
        self._registry = registry
        self._server: asyncio.Server | None = None
        self.address = address  # what was bound, once started

    async def start(self) -> None:
        if self._wanted.startswith("unix:"):
            self._server = await asyncio.start_unix_server(
                self._answer, self._wanted.removeprefix("unix:"), limit=REQUEST_BYTES_MAX
            )
            return
        host, _, port = self._wanted.rpartition(":")
        self._server = await asyncio.start_server(
            self._answer, host.strip("[]"), int(port), limit=REQUEST_BYTES_MAX
        )
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                status, body = self._respond(head.split(b"\r\n", 1)[0])
                writer.write(
                    f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE_LATEST}\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                    + body
                )
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            log.debug("a scrape was not finished: %s", error)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _respond(self, request_line: bytes) -> tuple[str, bytes]:
        parts = request_line.split(b" ")
        if len(parts) != 3 or parts[0] != b"GET":
            return "405 Method Not Allowed", b"only GET is answered here\n"
        if parts[1].split(b"?")[0] not in (b"/metrics", b"/"):
            return "404 Not Found", b"metrics are at /metrics\n"
        return "200 OK", generate_latest(self._registry)
