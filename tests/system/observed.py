"""A known workload on a real stack whose services all report, and everything that they reported."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.system.collector import Collector, Span
from tests.system.scrape import Scrape, scrape
from tests.system.stack import Stack

MODEL = "kvcommons-demo"
SERVICES = ("router", "prefill", "decode", "attention_pool", "kvstore", "ledger")
# Too little for the second turn of the session: it borrows from the pool.
DECODE_TOKENS = 192
LEASE_MS = 3000
RENEW = "/kvcommons.v1.Holder/Renew"
ANSWER_TOKENS = 40
SESSION = "observed session"
# Trace of a client that has one of its own.
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CALL_S_MAX = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """To a call that was not streamed."""

    request_id: str  # as the answer's header has it
    usage: Mapping[str, Any]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Observed:
    """After the stack has ended, so that nothing is still on its way."""

    answers: dict[str, Answer]  # by the request id that was given
    spans: list[Span]
    logs: dict[str, list[str]]  # lines by process
    during: dict[str, Scrape]  # while one stream ran, by service
    after: dict[str, Scrape]

    def trace(self, request_id: str) -> list[Span]:
        """All spans of the trace that a request's log line names."""
        lines = [json.loads(line) for line in self.logs["router"]]
        (trace_id,) = {line["trace_id"] for line in lines if line.get("request_id") == request_id}
        return [span for span in self.spans if span.trace_id == trace_id]


def observe(folder: Path) -> Observed:
    """Two turns of a session; one call with the client's own trace; one stream whose client goes away."""
    with Collector() as collector:
        tables: dict[str, dict[str, Any]] = {
            service: {"otlp_endpoint": collector.endpoint} for service in SERVICES
        }
        tables["decode"] |= {"capacity_tokens": DECODE_TOKENS, "lease_ms": LEASE_MS}
        with Stack(folder, tables=tables) as stack:
            answers = {
                "observed-1": _call(stack, "My cat is called Zuzu. " * 12, "observed-1", session_id=SESSION),
                "observed-2": _call(stack, "What is my cat called? " * 6, "observed-2", session_id=SESSION),
                "observed-3": _call(stack, "My dog is called Rex.", "observed-3", traceparent=TRACEPARENT),
            }
            during = _leave_a_stream(stack)
            for service in ("router", "prefill", "decode", "attention_pool"):
                stack.until(lambda service=service: _idle(stack, service), 10, f"{service} is not idle")
            stack.until(lambda: _saved(stack), 10, "KV is still being saved")
            after = {service: scrape(stack, service) for service in SERVICES}
        stack.assert_gone()
    logs = {path.stem: path.read_text().splitlines() for path in (stack.data / "logs").glob("*.jsonl")}
    return Observed(answers=answers, spans=collector.spans, logs=logs, during=during, after=after)


def _call(stack: Stack, message: str, request_id: str, *, traceparent: str = "", **body: Any) -> Answer:
    """With headers of its own, which the stack's client does not send."""
    address = urlsplit(stack.url)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=CALL_S_MAX)
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    asked = {
        "messages": [{"role": "user", "content": message}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        **body,
    }
    try:
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(asked),
            headers | ({"traceparent": traceparent} if traceparent else {}),
        )
        with connection.getresponse() as response:
            answer = json.loads(response.read())
    finally:
        connection.close()
    assert response.status == 200, answer
    seconds = float(str(response.headers["Server-Timing"]).rpartition("total;dur=")[2].split(",")[0]) / 1000
    return Answer(request_id=str(response.headers["X-Request-Id"]), usage=answer["usage"], seconds=seconds)


def _leave_a_stream(stack: Stack) -> dict[str, Scrape]:
    """Scrapes while it runs and has borrowed for so long that leases were renewed, and closes it long before
    its end."""
    pieces = stack.client.chat("Tell me a story.", None, max_tokens=1500, ignore_eos=True, temperature=0)
    next(pieces)
    stack.until(lambda: RENEW in _methods(stack), 20, "no lease is renewed")
    during = {service: scrape(stack, service) for service in ("router", "decode")}
    pieces.close()
    return during


def _methods(stack: Stack) -> set[str]:
    """That the pool was called by."""
    calls = scrape(stack, "attention_pool").families["kvcommons_rpc_calls_total"]
    return {sample.labels["method"] for sample in calls.samples}


def _idle(stack: Stack, service: str) -> bool:
    found = scrape(stack, service)
    return not found.value("kvcommons_num_requests_running") + found.value("kvcommons_num_requests_waiting")


def _saved(stack: Stack) -> bool:
    """All that was computed: a save holds its blocks until the store has them."""
    holders = [scrape(stack, service) for service in ("prefill", "decode", "attention_pool")]
    used = sum(one.value("kvcommons_kv_cache_usage_perc", model_name=MODEL) for one in holders)
    return not used and not scrape(stack, "kvstore").value("kvcommons_block_pending_writes")
