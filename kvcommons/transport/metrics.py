"""Prometheus metrics of the data plane: an Observer for a DataServer or DataClient."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from kvcommons.transport.base import Observation

_BUCKETS_S = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class DataMetrics:
    """One for a process and side: `side` is "server" or "client"."""

    def __init__(self, registry: CollectorRegistry, side: str) -> None:
        self._seconds = Histogram(
            f"kvcommons_data_{side}_seconds",
            "From a data request's head to the end of its last reply.",
            ["op", "code"],
            registry=registry,
            buckets=_BUCKETS_S,
        )
        self._bytes = Counter(
            f"kvcommons_data_{side}_bytes_total",
            "Payload bytes on the data plane.",
            ["op", "direction"],
            registry=registry,
        )
        # By operation and code: to look labels up takes longer than to count.
        self._known: dict[tuple[str, str], tuple[Histogram, Counter, Counter]] = {}

    def __call__(self, observation: Observation) -> None:
        key = observation.op, observation.error
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = (
                self._seconds.labels(observation.op, observation.error or "ok"),
                self._bytes.labels(observation.op, "sent"),
                self._bytes.labels(observation.op, "received"),
            )
        seconds, sent, received = known
        seconds.observe(observation.seconds)
        sent.inc(observation.sent_bytes)
        received.inc(observation.received_bytes)
