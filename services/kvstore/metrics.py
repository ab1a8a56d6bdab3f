"""What the kvstore shows to Prometheus. The store counts by itself; a scrape reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.kvstore.blocks import BlockStore
from services.kvstore.records.interface import RecordsObserver

_COMMIT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class SessionMetrics:
    """Of committed turns."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "kvcommons_turn_commit_seconds",
            "From a commit's receipt until the turn was durable, waiting for its blocks included.",
            registry=registry,
            buckets=_COMMIT_BUCKETS,
        )
        self._repeated = Counter(
            "kvcommons_turn_commits_repeated_total", "Commits of turns committed before.", registry=registry
        )

    def committed(self, seconds: float, *, new: bool) -> None:
        self._seconds.observe(seconds)
        if not new:
            self._repeated.inc()


class RecordsMetrics(RecordsObserver):
    """Of calls on session records."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "kvcommons_records_seconds",
            "A call on session records, its queueing and, in a database, further tries included.",
            ["call"],
            registry=registry,
            buckets=_COMMIT_BUCKETS,
        )
        self._retries = Counter(
            "kvcommons_records_retries_total",
            "Transactions of a database that were done again, by what kept them from happening.",
            ["cause"],
            registry=registry,
        )
        self._connections = Gauge(
            "kvcommons_records_connections", "Connections to a database in use by calls.", registry=registry
        )

        self._damaged = Gauge(
            "kvcommons_records_damaged",
            "Session records that cannot be read, of those that were looked at.",
            registry=registry,
        )

    def damaged(self, records: int) -> None:
        self._damaged.set(records)

    def called(self, call: str, seconds: float) -> None:
        self._seconds.labels(call).observe(seconds)

    def retried(self, cause: str) -> None:
        self._retries.labels(cause).inc()

    def in_use(self, connections: int) -> None:
        self._connections.set(connections)


class StoreCollector(Collector):
    """Figures of the block store and the number of sessions, which `sessions` gives."""

    def __init__(self, store: BlockStore, sessions: Callable[[], int]) -> None:
        self._store = store
        self._sessions = sessions

    def collect(self) -> Iterator[Metric]:
        stats = self._store.stats()
        counters = stats.counters
        yield GaugeMetricFamily("kvcommons_sessions", "Sessions stored.", value=self._sessions())
        yield GaugeMetricFamily(
            "kvcommons_block_pending_writes",
            "Blocks whole in DRAM, not on disk yet.",
            value=stats.pending_writes,
        )
        yield GaugeMetricFamily(
            "kvcommons_block_staging", "Blocks of which not all layers have come.", value=stats.staging
        )
        for name, text, dram, disk in (
            ("blocks", "Blocks in a tier.", stats.dram_blocks, stats.disk_blocks),
            ("block_bytes", "Bytes of blocks in a tier.", stats.dram_used_bytes, stats.disk_used_bytes),
            (
                "kv_cache_usage_perc",
                "Share of a tier that blocks take, 0 to 1.",
                stats.dram_used_bytes / max(1, stats.dram_capacity_bytes),
                stats.disk_used_bytes / max(1, stats.disk_capacity_bytes),
            ),
        ):
            gauge = GaugeMetricFamily(f"kvcommons_{name}", text, labels=["tier"])
            gauge.add_metric(["dram"], dram)
            gauge.add_metric(["disk"], disk)
            yield gauge
        for name, text, dram, disk in (
            ("block_hits", "Blocks asked for and found.", counters.hits_dram, counters.hits_disk),
            ("block_evictions", "Copies that made room.", counters.evictions_dram, counters.evictions_disk),
        ):
            family = CounterMetricFamily(f"kvcommons_{name}", text, labels=["tier"])
            family.add_metric(["dram"], dram)
            family.add_metric(["disk"], disk)
            yield family
        for name, text, value in (
            ("block_misses", "Blocks asked for and not found.", counters.misses),
            ("block_corrupt", "Blocks dropped because their bytes were wrong.", counters.corrupt),
            ("block_forgotten", "Blocks that went with the last session naming them.", counters.forgotten),
            ("block_expired", "Blocks that nobody used for their time to live.", counters.expired),
            ("block_read_errors", "Blocks dropped because the disk did not give them.", counters.read_errors),
            ("block_write_failures", "Blocks that did not get to disk.", counters.write_failures),
            ("block_prefetched", "Blocks fetched from disk because a router hinted.", counters.prefetched),
            ("block_refused", "Objects refused because DRAM was full.", counters.refused),
            ("block_abandoned", "Blocks of which layers never came.", counters.abandoned),
            ("block_received_bytes", "Payload received.", counters.put_bytes),
            ("block_sent_bytes", "Payload sent.", counters.sent_bytes),
            ("block_disk_read_bytes", "Bytes read from slab files.", counters.disk_read_bytes),
            ("block_scrubbed_bytes", "Bytes on disk checked by the scrub.", counters.scrubbed_bytes),
            ("block_disk_written_bytes", "Bytes written to slab files.", counters.disk_written_bytes),
        ):
            yield CounterMetricFamily(f"kvcommons_{name}", text, value=value)
