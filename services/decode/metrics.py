"""What decode measures, beside load and calls."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvcommons.engine.callbacks import SequenceUpdate
from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.telemetry.metrics import TOKEN_BUCKETS

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PAUSE_BUCKETS = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)


class DecodeMetrics:
    """Of iterations and of sequences that ended."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "kvcommons_iteration_seconds", "Model execution of an iteration, attention elsewhere included.",
            registry=registry, buckets=TOKEN_BUCKETS,
        )  # fmt: skip
        self._parts = Counter(
            "kvcommons_iteration_part_seconds_total",
            "Of iterations, by what they spend it on: slices of the model, attention, network, waiting.",
            ["part"], registry=registry,
        )  # fmt: skip
        self._batch = Histogram(
            "kvcommons_iteration_batch_size", "Sequences of an iteration.",
            registry=registry, buckets=BATCH_BUCKETS,
        )  # fmt: skip
        self._tokens = Counter(
            "kvcommons_decode_tokens_total", "Tokens sampled by decode.", registry=registry
        )
        self._drafts = Counter(
            "kvcommons_draft_tokens_total",
            "Tokens that were drafted and verified, by what became of them: accepted, rejected.",
            ["outcome"], registry=registry,
        )  # fmt: skip
        self._ended = Counter(
            "kvcommons_sequences_ended_total", "Sequences, by how they ended: a reason or an error's code.",
            ["outcome"], registry=registry,
        )  # fmt: skip
        self._slices = Counter(
            "kvcommons_slices_total",
            "Slices between decode instances: for others, by others, and here in place of others.",
            ["whose"], registry=registry,
        )  # fmt: skip
        self._native_layers = Counter(
            "kvcommons_native_layers_total",
            "Layers of iterations whose holders were asked on the native path.",
            registry=registry,
        )
        self._peers = Gauge(
            "kvcommons_replica_peers", "Other instances that slices of this one's batches may go to.",
            registry=registry,
        )  # fmt: skip
        self._moved = Counter(
            "kvcommons_moved_blocks_total", "Blocks of running sequences that changed holders.",
            ["to"], registry=registry,
        )  # fmt: skip
        self._pauses = Histogram(
            "kvcommons_move_pause_seconds", "What an iteration waited for a move's switch.",
            registry=registry, buckets=PAUSE_BUCKETS,
        )  # fmt: skip

    def iteration(self, batch: int, timing: IterationTiming) -> None:
        self._seconds.observe(timing.seconds)
        for part, seconds in timing.parts.items():
            self._parts.labels(part).inc(seconds)
        self._batch.observe(batch)
        self._tokens.inc(batch)
        self._native_layers.inc(timing.native_layers)
        self._slices.labels("by_peers").inc(timing.away)
        self._slices.labels("instead_of_peers").inc(timing.stood_in)

    def verified(self, drafted: int, accepted: int) -> None:
        self._drafts.labels("accepted").inc(accepted)
        self._drafts.labels("rejected").inc(drafted - accepted)
        self._tokens.inc(accepted)

    def for_peer(self) -> None:
        """A slice was computed for another instance."""
        self._slices.labels("for_peers").inc()

    def group(self, well: Callable[[], int]) -> None:
        """Of instances that compute slices for each other: how many others do."""
        self._peers.set_function(well)

    def ended(self, step: SequenceUpdate) -> None:
        self._ended.labels(step.error.code if step.error is not None else step.reason).inc()

    def moved(self, blocks: int, paused_s: float, *, home: bool) -> None:
        """Blocks of a sequence, which waited so long for its switch."""
        self._moved.labels("home" if home else "holder").inc(blocks)
        self._pauses.observe(paused_s)
