"""The metrics of KV events."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.node.kv_events.publisher import KvEventPublisher


class KvEventCollector(Collector):
    """Figures of a publisher."""

    def __init__(self, publisher: KvEventPublisher) -> None:
        self._publisher = publisher

    def collect(self) -> Iterable[Metric]:
        """Batches, blocks by what was told of them, and replays by their end."""
        yield CounterMetricFamily("baton:kv_event_batches", "Batches of KV events", self._publisher.num_batches)
        counted, replayed = self._publisher.blocks, self._publisher.replays
        blocks = CounterMetricFamily("baton:kv_event_blocks", "Blocks by what was told of them", labels=["event"])
        blocks.add_metric(["stored"], counted.num_stored)
        blocks.add_metric(["removed"], counted.num_removed)
        blocks.add_metric(["private"], counted.num_private)
        yield blocks
        doc = "Replays for readers that have missed batches, by their end"
        replays = CounterMetricFamily("baton:kv_event_replays", doc, labels=["end"])
        replays.add_metric(["whole"], replayed.num_whole)
        replays.add_metric(["cut"], replayed.num_cut)
        replays.add_metric(["abandoned"], replayed.num_abandoned)
        yield replays
