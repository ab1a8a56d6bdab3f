"""What prefill measures, beside load and calls."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from kvcommons.engine.prompt import FirstToken
from kvcommons.telemetry.metrics import TTFT_BUCKETS


class PrefillMetrics:
    """Of jobs that ended well. Where a prompt's KV came from: `source` is computed, device or store."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tokens = Counter(
            "kvcommons_prefill_tokens_total", "Prompt tokens, by where their KV came from.", ["source"],
            registry=registry,
        )  # fmt: skip
        self._queue_s, self._compute_s, self._load_wait_s = (
            Histogram(f"kvcommons_prefill_{name}_seconds", text, registry=registry, buckets=TTFT_BUCKETS)
            for name, text in (
                ("queue", "From a job's arrival to its first chunk."),
                ("compute", "Model execution of a job."),
                ("load_wait", "Computing waited for history."),
            )
        )

    def ended(self, tokens: int, first: FirstToken) -> None:
        """A job of `tokens` has its first token."""
        self._tokens.labels("computed").inc(tokens - first.cached_tokens)
        self._tokens.labels("device").inc(first.device_tokens)
        self._tokens.labels("store").inc(first.cached_tokens - first.device_tokens)
        self._queue_s.observe(first.queue_us / 1e6)
        self._compute_s.observe(first.compute_us / 1e6)
        self._load_wait_s.observe(first.load_wait_us / 1e6)
