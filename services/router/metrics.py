"""What the router measures, beside what all services do."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvcommons.telemetry.metrics import CALL_BUCKETS, LoadMetrics, RequestMetrics


class RouterMetrics:
    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        running: Callable[[], int],
        waiting: Callable[[], int],
        capacity_waiting: Callable[[], int],
        documents: Callable[[], int],
        connections: Callable[[], int],
    ) -> None:
        """They give choices when they are asked for: those of the request queue, and of its running ones
        those that wait for room. `documents` gives those on their way, `connections` open ones."""
        self.registry = registry
        self._running = running
        self._waiting = waiting
        self._requests: RequestMetrics | None = None
        self.resumptions = Counter(
            "kvcommons_turn_resumptions_total",
            "How often a choice went on on other instances after a failure.",
            registry=registry,
        )
        self.commit_s = Histogram(
            "kvcommons_turn_commit_seconds",
            "From a turn's last token until it was durable.",
            registry=registry,
            buckets=CALL_BUCKETS,
        )
        Gauge(
            "kvcommons_room_waiting",
            "Choices that wait until decode has room for them.",
            registry=registry,
        ).set_function(capacity_waiting)
        Gauge("kvcommons_documents", "Documents on their way into sessions.", registry=registry).set_function(
            documents
        )
        Gauge("kvcommons_http_connections", "Open connections of clients.", registry=registry).set_function(
            connections
        )
        self.connections_closed = Counter(
            "kvcommons_http_connections_closed_total",
            "Connections that the router closed: head (no request came in time), unread (the client did not "
            "read its answer), displaced (idle, and its place was needed), refused (none was idle).",
            ["reason"],
            registry=registry,
        )
        self.service_classes = Counter(
            "kvcommons_service_class_requests_total",
            "Requests by the class of service that they asked for, and what became of its objective for the "
            "first token: met, missed, and where it could not be met refused or served as best_effort, whose "
            "first token counts as met under default.",
            ["service_class", "outcome"],
            registry=registry,
        )
        self.errors = Counter(
            "kvcommons_request_errors_total",
            "Requests that ended with an error.",
            ["code"],
            registry=registry,
        )
        self.disconnects = Counter(
            "kvcommons_request_disconnects_total", "Requests whose client went away.", registry=registry
        )

    def class_outcomes(self) -> dict[str, dict[str, int]]:
        """By class of service: how many requests came to which outcome."""
        found: dict[str, dict[str, int]] = {}
        for metric in self.service_classes.collect():
            for sample in metric.samples:
                if sample.name.endswith("_total"):
                    by_outcome = found.setdefault(sample.labels["service_class"], {})
                    by_outcome[sample.labels["outcome"]] = int(sample.value)
        return found

    def requests(self, model_name: str) -> RequestMetrics:
        """Made when the first model is known by its name, which stays the label: one is served at a time. So
        are the gauges of the queue, which is empty before."""
        if self._requests is None:
            self._requests = RequestMetrics(self.registry, model_name)
            LoadMetrics(self.registry, model_name, running=self._running, waiting=self._waiting)
        return self._requests
