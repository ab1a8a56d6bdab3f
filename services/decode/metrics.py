"""What decode measures, beside load and calls."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from kvcommons.telemetry.metrics import TOKEN_BUCKETS
from services.decode.engine import Step

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class DecodeMetrics:
    """Of iterations and of sequences that ended."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "kvcommons_iteration_seconds", "Model execution of an iteration, attention elsewhere included.",
            registry=registry, buckets=TOKEN_BUCKETS,
        )  # fmt: skip
        self._batch = Histogram(
            "kvcommons_iteration_batch_size", "Sequences of an iteration.",
            registry=registry, buckets=BATCH_BUCKETS,
        )  # fmt: skip
        self._tokens = Counter(
            "kvcommons_decode_tokens_total", "Tokens sampled by decode.", registry=registry
        )
        self._ended = Counter(
            "kvcommons_sequences_ended_total", "Sequences, by how they ended: a reason or an error's code.",
            ["outcome"], registry=registry,
        )  # fmt: skip

    def iteration(self, batch: int, seconds: float) -> None:
        self._seconds.observe(seconds)
        self._batch.observe(batch)
        self._tokens.inc(batch)

    def ended(self, step: Step) -> None:
        self._ended.labels(step.error.code if step.error is not None else step.reason).inc()
