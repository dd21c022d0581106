"""Each figure of KV events is told under its own name."""

from __future__ import annotations

from contextlib import closing

from baton.node.kv_events.metrics import KvEventCollector
from baton.node.kv_events.publisher import KvEventPublisher
from tests.node.kv_events.small_node import CONFIG


def test_blocks_are_told_by_event_and_replays_by_end() -> None:
    with closing(KvEventPublisher(CONFIG, 16, {})) as publisher:
        blocks, replays = publisher.blocks, publisher.replays
        blocks.num_stored, blocks.num_removed, blocks.num_private = 2, 3, 4
        replays.num_whole, replays.num_cut, replays.num_abandoned = 5, 6, 7
        families = [*KvEventCollector(publisher).collect()]
    told = {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}
    assert told == {
        ("baton:kv_event_batches_total",): 1,
        ("baton:kv_event_blocks_total", "stored"): 2,
        ("baton:kv_event_blocks_total", "removed"): 3,
        ("baton:kv_event_blocks_total", "private"): 4,
        ("baton:kv_event_replays_total", "whole"): 5,
        ("baton:kv_event_replays_total", "cut"): 6,
        ("baton:kv_event_replays_total", "abandoned"): 7,
    }
