"""The ledger's own metrics; its calls are counted by the RPC layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.ledger.commons import Commons
from services.ledger.feed import Feed
from services.ledger.mirror import Mirror
from services.ledger.registry import Registry


class LedgerMetrics(Collector):
    """Reads what the ledger's parts know, at each scrape."""

    def __init__(
        self,
        registry: Registry,
        mirror: Mirror,
        feed: Feed,
        commons: Commons,
    ) -> None:
        self._registry = registry
        self._mirror = mirror
        self._feed = feed
        self._commons = commons

    def register(self, prometheus: CollectorRegistry) -> None:
        prometheus.register(self)

    def collect(self) -> Iterable[Metric]:
        instances = GaugeMetricFamily(
            "kvcommons_ledger_instances", "Instances in the view.", labels=["instance_service"]
        )
        for service, count in Counter(one.service for one in self._registry.view()).items():
            instances.add_metric([service], count)
        yield instances
        yield GaugeMetricFamily(
            "kvcommons_ledger_etcd_connected", "1 while etcd keeps the view.", float(self._mirror.connected)
        )
        yield GaugeMetricFamily(
            "kvcommons_ledger_watchers", "Processes that watch the view here.", self._feed.watchers
        )
        yield CounterMetricFamily(
            "kvcommons_ledger_etcd_writes", "Writes that etcd has acknowledged.", self._mirror.writes_done
        )
        owed = self._commons.debts.debts(self._registry.instances.keys())
        yield GaugeMetricFamily(
            "kvcommons_ledger_debt_blocks",
            "Blocks that instances owe each other.",
            sum(sum(creditors.values()) for creditors in owed.values()),
        )
        yield GaugeMetricFamily(
            "kvcommons_ledger_leader", "1 while this replica settles debts.", float(self._commons.leads())
        )
        yield CounterMetricFamily(
            "kvcommons_ledger_settlements", "Settlements that have ended.", self._commons.counts.ended
        )
        yield CounterMetricFamily(
            "kvcommons_ledger_settled_blocks",
            "Blocks that settlements brought home.",
            self._commons.counts.blocks,
        )
