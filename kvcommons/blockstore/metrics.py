"""What became of blocks on their way to a kvstore. The saver counts by itself; a scrape reads it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcommons.blockstore.saver import BlockSaver


class SaverCollector(Collector):
    def __init__(self, saver: BlockSaver) -> None:
        self._saver = saver

    def collect(self) -> Iterator[Metric]:
        stats = self._saver.stats()
        objects = CounterMetricFamily(
            "kvcommons_block_saves",
            "Layers of blocks given to the saver: saved, unwanted (the store has them) or dropped.",
            labels=["outcome"],
        )
        objects.add_metric(["saved"], stats.saved_objects)
        objects.add_metric(["unwanted"], stats.unwanted_objects)
        objects.add_metric(["dropped"], stats.dropped_objects)
        yield objects
        yield GaugeMetricFamily(
            "kvcommons_block_save_pending_bytes", "KV that waits to be saved.", value=stats.pending_bytes
        )
