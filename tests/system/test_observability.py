"""What an operator sees of a request: one trace over all services, JSON log lines, metrics with their true
values; and that docs/operations.md names every metric there is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.collector import Span
from tests.system.monitoring import ADDED, expressions, grouped_by, metrics_of
from tests.system.observed import ANSWER_TOKENS, MODEL, SERVICES, SESSION, TRACEPARENT, Observed, observe

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
# Clocks of one machine; a span's start is noted a moment after its call arrived.
CLOCK_NS = 2_000_000
# Calls that are waited for a second or two, and then made again.
ASKED_AGAIN = ("/Heartbeat", "/Candidates", "/Renew", "/Stats", "/Match", "/Hint")


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    return observe(tmp_path_factory.mktemp("observed"))


def one(spans: list[Span], service: str, name: str) -> Span:
    (found,) = [span for span in spans if (span.service, span.name) == (service, name)]
    return found


def test_a_request_is_one_tree_of_spans_over_all_services(observed: Observed) -> None:
    spans = observed.trace("observed-2")
    assert {span.service for span in spans} == set(SERVICES)
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    (root,) = [span for span in spans if not span.parent_id]
    assert (root.service, root.name) == ("router", "POST /v1/chat/completions")
    orphans = [span for span in spans if span.parent_id and span.parent_id not in by_id]
    assert orphans == []

    def parent(span: Span) -> Span:
        return by_id[span.parent_id]

    chat = one(spans, "router", f"chat {MODEL}")
    generate = one(spans, "decode", "kvcommons.v1.Decode/Generate")
    compute = one(spans, "prefill", "kvcommons.v1.Prefill/Compute")
    assert parent(chat) == parent(one(spans, "kvstore", "kvcommons.v1.Sessions/BeginTurn")) == root
    for span in (
        generate,
        compute,
        one(spans, "kvstore", "kvcommons.v1.Blocks/Match"),
        one(spans, "kvstore", "kvcommons.v1.Sessions/CommitTurn"),
    ):
        assert parent(span) == chat
    assert parent(one(spans, "prefill", "prefill chunk")) == compute
    for span in spans:
        if span.service in ("ledger", "attention_pool"):  # who lends, and what is lent
            assert parent(span) in (generate, compute), span
    saved = [span for span in spans if span.name == "kvstore.put_layer"]
    makers = {parent(span).service for span in saved}
    assert makers == {"prefill", "decode", "attention_pool"}  # each saves what it made or holds
    loaded = [span for span in spans if span.name == "kvstore.get_layers"]
    # What decode generated in the first turn, prefill has from the store.
    assert compute in {parent(span) for span in loaded}
    # A part that is borrowed is loaded by its holder.
    assert all(parent(span) in (generate, compute) or parent(parent(span)) == generate for span in loaded)


def test_a_span_says_what_it_is_to_the_one_around_it(observed: Observed) -> None:
    """To whoever draws a map of services: who answers, and who asks."""
    kinds = {"POST /v1/chat/completions": "server", f"chat {MODEL}": "client", "prefill chunk": "internal"}
    spans = observed.trace("observed-2")
    assert {span.kind for span in spans} == {"server", "client", "internal"}
    for span in spans:
        assert span.kind == kinds.get(span.name, "server"), span.name


def test_a_client_that_left_failed_its_request(observed: Observed) -> None:
    failed = {(span.service, span.name): span for span in observed.spans if span.failed}
    assert failed.keys() == {("router", "POST /v1/chat/completions"), ("router", f"chat {MODEL}")}
    assert {span.attributes["error.type"] for span in failed.values()} == {"cancelled"}


def test_spans_take_the_time_that_their_part_takes(observed: Observed) -> None:
    spans = observed.trace("observed-2")
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        assert not span.failed, span
        assert 0 <= span.seconds < 30, span
        if span.parent_id:
            assert span.start_ns >= by_id[span.parent_id].start_ns - CLOCK_NS, span
    root = one(spans, "router", "POST /v1/chat/completions")
    chat = one(spans, "router", f"chat {MODEL}")
    generate = one(spans, "decode", "kvcommons.v1.Decode/Generate")
    compute = one(spans, "prefill", "kvcommons.v1.Prefill/Compute")
    chunk = one(spans, "prefill", "prefill chunk")
    commit = one(spans, "kvstore", "kvcommons.v1.Sessions/CommitTurn")
    assert root.seconds >= chat.seconds >= generate.seconds >= compute.seconds >= chunk.seconds > 0
    assert root.seconds == pytest.approx(observed.answers["observed-2"].seconds, abs=0.05)
    assert generate.start_ns <= compute.start_ns <= chunk.start_ns
    # A turn is committed once its last token is there.
    assert commit.start_ns >= compute.end_ns - CLOCK_NS


def test_the_request_span_speaks_opentelemetrys_language(observed: Observed) -> None:
    for request_id in ("observed-1", "observed-2"):
        usage = observed.answers[request_id].usage
        spans = observed.trace(request_id)
        reported = one(spans, "router", f"chat {MODEL}").attributes
        assert isinstance(reported.pop("gen_ai.request.seed"), str)  # the router drew it
        assert re.fullmatch(r"[0-9a-f]{24}", reported.pop("gen_ai.response.id"))
        assert reported == {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "kvcommons",
            "gen_ai.conversation.id": SESSION,
            "gen_ai.request.model": MODEL,
            "gen_ai.request.max_tokens": ANSWER_TOKENS,
            "gen_ai.request.temperature": 0.0,
            "gen_ai.response.model": MODEL,
            "gen_ai.response.finish_reasons": ["length"],
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": usage["completion_tokens"],
            "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        }
        root = one(spans, "router", "POST /v1/chat/completions")
        assert root.attributes["http.response.status_code"] == 200
    assert observed.answers["observed-2"].usage["prompt_tokens_details"]["cached_tokens"] >= 100


def test_a_client_that_traces_finds_its_request_in_its_own_trace(observed: Observed) -> None:
    spans = observed.trace("observed-3")
    root = one(spans, "router", "POST /v1/chat/completions")
    assert (root.trace_id, root.parent_id) == (TRACEPARENT[3:35], TRACEPARENT[36:52])
    assert "gen_ai.conversation.id" not in one(spans, "router", f"chat {MODEL}").attributes
    assert {"prefill", "decode", "kvstore"} <= {span.service for span in spans}


def test_every_trace_begins_with_a_request(observed: Observed) -> None:
    """Heartbeats, watches and renewals are nobody's request."""
    traces: dict[str, list[Span]] = {}
    for span in observed.spans:
        traces.setdefault(span.trace_id, []).append(span)
    firsts = [min(spans, key=lambda span: span.start_ns) for spans in traces.values()]
    assert {span.service for span in firsts} == {"router"}
    names = {span.name for span in observed.spans}
    assert not {name for name in names if name.endswith(("/Heartbeat", "/Watch", "/Check", "/Renew"))}


def lines(observed: Observed) -> Iterator[tuple[str, dict[str, Any]]]:
    for process, texts in observed.logs.items():
        assert texts, f"{process} wrote nothing"
        for text in texts:
            line = json.loads(text)
            assert isinstance(line, dict), text
            yield process, line


def test_every_log_line_is_an_object_and_none_complains(observed: Observed) -> None:
    assert observed.logs.keys() == {*SERVICES, "etcd"}
    for process, line in lines(observed):
        if process == "etcd":
            continue  # its own form, and its own opinion of what is worth a warning
        assert {"ts", "level", "service", "instance", "logger", "message"} <= line.keys(), line
        assert line["service"] == process
        # On a busy machine a ledger may be silent, or late, for a while.
        assert line["level"] == "info" or line["logger"] == "kvcommons.rpc.directory", line


def test_a_request_can_be_followed_through_the_logs_of_all_services(observed: Observed) -> None:
    for request_id, answer in observed.answers.items():
        assert answer.request_id == request_id
        reported = {
            process: line for process, line in lines(observed) if line.get("request_id") == request_id
        }
        session = request_id != "observed-3"
        assert reported.keys() == {"router", "prefill", "decode"} | ({"kvstore"} if session else set())
        assert len({line["trace_id"] for line in reported.values()}) == 1
        assert {line.get("session_id") for line in reported.values()} == {SESSION if session else None}
        assert reported["router"]["message"] == "answered"
        for name in ("prompt_tokens", "completion_tokens"):
            assert reported["router"][name] == answer.usage[name]
        assert reported["decode"]["tokens"] == answer.usage["completion_tokens"]
        assert reported["decode"]["outcome"] == "length"
        cached = answer.usage["prompt_tokens_details"]["cached_tokens"]
        assert reported["router"]["cached_tokens"] == reported["prefill"]["cached_tokens"] == cached
    outcomes = [
        line["outcome"] for process, line in lines(observed) if process == "decode" and "outcome" in line
    ]
    assert sorted(outcomes) == ["cancelled", "length", "length", "length"]


def test_the_routers_metrics_are_what_clients_saw(observed: Observed) -> None:
    router = observed.after["router"]
    usages = [answer.usage for answer in observed.answers.values()]
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert cached > 0
    for name, expected in {
        "prompt_tokens_total": prompt,
        "prefix_cache_queries_total": prompt,
        "prefix_cache_hits_total": cached,
        "generation_tokens_total": ANSWER_TOKENS * len(usages),
        "e2e_request_latency_seconds_count": len(usages),
        "time_to_first_token_seconds_count": len(usages) + 1,  # one client left after its first tokens
        "request_queue_time_seconds_count": len(usages),
    }.items():
        assert router.value(f"kvcommons_{name}", model_name=MODEL) == expected, name
    assert router.value("kvcommons_request_success_total", model_name=MODEL, finished_reason="length") == 3
    assert router.value("kvcommons_request_disconnects_total") == 1
    assert router.value("kvcommons_request_errors_total") == 0
    assert router.value("kvcommons_turn_resumptions_total") == 0
    assert router.value("kvcommons_turn_commit_seconds_count") == 2
    total_s = sum(answer.seconds for answer in observed.answers.values())
    assert router.value("kvcommons_e2e_request_latency_seconds_sum") == pytest.approx(total_s, abs=0.1)
    assert router.value("kvcommons_inter_token_latency_seconds_sum") > 0
    assert router.value("kvcommons_num_requests_running", model_name=MODEL) == 0
    assert router.value("kvcommons_num_requests_waiting", model_name=MODEL) == 0


def test_the_other_services_metrics_agree(observed: Observed) -> None:
    after = observed.after
    usages = [answer.usage for answer in observed.answers.values()]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    reused = [
        after["prefill"].value("kvcommons_prefill_tokens_total", source=name) for name in ("device", "store")
    ]
    assert sum(reused) == cached
    assert after["decode"].value("kvcommons_sequences_ended_total", outcome="length") == 3
    # Prefill samples the first token of each.
    assert after["decode"].value("kvcommons_decode_tokens_total") >= 3 * (ANSWER_TOKENS - 1)
    assert after["decode"].value("kvcommons_iteration_seconds_count") > 0
    for service in ("prefill", "decode"):
        error = after[service].value("kvcommons_iteration_prediction_error_ratio", model_name=MODEL)
        assert 0 < error <= 1, service
    assert after["attention_pool"].value("kvcommons_data_server_seconds_count", op="attend_layer") > 0
    for service in ("prefill", "decode", "attention_pool"):
        assert after[service].value("kvcommons_kv_cache_usage_perc", model_name=MODEL) == 0, service
        assert after[service].value("kvcommons_block_saves_total", outcome="saved") > 0, service
        assert after[service].value("kvcommons_block_saves_total", outcome="dropped") == 0, service
    store = after["kvstore"]
    assert store.value("kvcommons_sessions") == 1
    assert store.value("kvcommons_turn_commit_seconds_count") == 2
    assert store.value("kvcommons_blocks", tier="disk") > 0
    assert store.value("kvcommons_block_received_bytes_total") == store.value(
        "kvcommons_data_server_bytes_total", op="put_layer", direction="received"
    )
    assert after["ledger"].value("kvcommons_ledger_etcd_connected") == 1
    for service in ("router", "prefill", "decode", "attention_pool", "kvstore", "ledger"):
        assert after["ledger"].value("kvcommons_ledger_instances", instance_service=service) == 1, service
        for sample in after[service].families["kvcommons_rpc_calls_total"].samples:
            # A ledger that is asked while it starts says that it is loading.
            allowed = {"ok", "cancelled", "loading"}
            if sample.labels["method"].endswith(ASKED_AGAIN):
                allowed.add("deadline_exceeded")
            assert sample.labels["code"] in allowed, (service, sample)


def test_load_shows_while_there_is_some(observed: Observed) -> None:
    assert observed.during["router"].value("kvcommons_num_requests_running") == 1
    assert observed.during["decode"].value("kvcommons_num_requests_running") == 1
    assert 0 < observed.during["decode"].value("kvcommons_kv_cache_usage_perc") <= 1


def test_the_operations_page_names_every_metric_and_no_other(observed: Observed) -> None:
    rows = re.findall(r"^\| `([a-z0-9_]+)` \| ([a-z_, ]+) \| [^|]+ \|$", PAGE.read_text(), re.MULTILINE)
    documented = {
        (service, name)
        for name, services in rows
        for service in (SERVICES if services == "all" else services.split(", "))
    }
    assert len(rows) == len({name for name, _ in rows}), "a metric has two rows"
    exported = {(service, name) for service in SERVICES for name in observed.after[service].families}
    assert documented - exported == set(), "documented, but no service has it"
    assert exported - documented == set(), "no row in docs/operations.md"


def test_the_dashboard_and_the_rules_ask_for_metrics_and_labels_that_exist(observed: Observed) -> None:
    labels: dict[str, set[str]] = {"up": set()}
    for scraped in observed.after.values():
        for name, family in scraped.families.items():
            for sample in family.samples:
                labels.setdefault(sample.name, set()).update(sample.labels)
            labels.setdefault(name, set())
    wrong = []
    for place, expression in expressions():
        named = metrics_of(expression)
        assert named, place
        known = {label for name, _ in named for label in labels.get(name, ())} | ADDED
        wrong += [f"{place}: no metric {name}" for name, _ in named if name not in labels]
        asked = {label for _, asked in named for label in asked} | grouped_by(expression)
        seen = any(labels.get(name) for name, _ in named)  # what never happened here has no samples
        wrong += [f"{place}: no label {label}" for label in asked - known if seen]
    assert wrong == []
