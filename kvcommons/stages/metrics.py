"""What the first stage measures of all of them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class StageMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._busy_s = Counter(
            "kvcommons_stage_busy_seconds_total",
            "What iterations took in each pipeline stage, at each of its ranks.",
            ["stage", "rank"],
            registry=registry,
        )

    def busy(self, stage: int, rank: int, seconds: float) -> None:
        self._busy_s.labels(str(stage), str(rank)).inc(seconds)
