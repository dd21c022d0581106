from __future__ import annotations

from collections.abc import Iterable

import pytest
from prometheus_client.core import Metric

from baton.engine.cache.offload import KvOffload
from baton.engine.cache.store import TierCounters
from baton.engine.cache.tiered_pool import TieredPool
from baton.engine.cache.tiers import Tier, Tiers
from baton.engine.scheduler.step import RequestOutput, SampledToken
from baton.node.metrics import HandoffTimes, OffloadCollector, StepCounters
from baton.wire.messages.output import HandoffFigures
from baton.wire.request_key import RequestKey
from tests.engine.scheduler.simulation import Device
from tests.engine.scheduler.stores import SlotBytes, TestStore

KEY = RequestKey(b"h" * 16, 1)


def values(metrics: Iterable[Metric]) -> dict[str, float]:
    """`{"name label": value}` of all samples."""
    return {
        " ".join([sample.name.removeprefix("baton:"), *sample.labels.values()]): sample.value
        for metric in metrics
        for sample in metric.samples
    }


def output(index: int, *, num_step_tokens: int, num_cached_tokens: int = 0, sampled: bool = True) -> RequestOutput:
    tokens = (SampledToken(5, None),) if sampled else ()
    return RequestOutput(KEY, num_step_tokens, 0, num_cached_tokens, index, tokens, "", False, has_failed=False)


def test_tokens_are_counted_by_where_their_kv_came_from_each_once() -> None:
    counters = StepCounters()
    counters.count([output(0, num_step_tokens=30, num_cached_tokens=16, sampled=False)])
    counters.count([output(0, num_step_tokens=4, num_cached_tokens=16), output(7, num_step_tokens=1)])
    counters.count([output(1, num_step_tokens=1, num_cached_tokens=16)])
    counters.count_delivered(num_tokens=100, num_cached_tokens=32)
    counted = values(counters.metrics())
    assert counted["prompt_tokens_by_source_total local_cache_hit"] == 16 + 32
    assert counted["prompt_tokens_by_source_total external_kv_transfer"] == 100 - 32
    assert counted["computed_tokens_total"] == 30 + 4 + 1 + 1
    assert counted["generation_tokens_total"] == 3
    assert counted["steps_total"] == 3


def test_forced_tokens_are_counted_as_tokens_of_outputs_too() -> None:
    counters = StepCounters()
    three = (SampledToken(5, None), SampledToken(6, None), SampledToken(7, None))
    counters.count([output(3, num_step_tokens=1)._replace(tokens=three, num_forced=2), output(3, num_step_tokens=1)])
    counted = values(counters.metrics())
    assert (counted["generation_tokens_total"], counted["forced_tokens_total"]) == (4, 2)


def test_each_tier_of_a_kv_store_has_figures_of_its_own() -> None:
    host = Tier("host", TestStore(usage=0.5), TierCounters(num_stored_blocks=3, num_loaded_blocks=2))
    counters = TierCounters(num_dropped_blocks=4, num_damaged_blocks=5, num_failures=6, num_silent_loads=7, num_rests=8)
    disk = Tier("disk", TestStore(usage=0.25), counters)
    offload = KvOffload(TieredPool(Tiers([host, disk]), SlotBytes(Device(4))), 4, 64, lambda: None)
    shown = values(OffloadCollector(offload).collect())
    assert shown["kv_tier_blocks_total host stored"] == 3
    assert shown["kv_tier_bytes_total host loaded"] == 2 * 32
    assert shown["kv_tier_blocks_total disk dropped"] == 4
    assert [shown[f"kv_tier_faults_total disk {each}"] for each in ("damaged", "failed", "silent")] == [5, 6, 7]
    assert (shown["kv_tier_rests_total host"], shown["kv_tier_rests_total disk"]) == (0, 8)
    assert (shown["kv_tier_usage_perc host"], shown["kv_tier_usage_perc disk"]) == (0.5, 0.25)
    assert shown["kv_offload_cache_usage_perc"] == 0.25


def test_a_node_that_has_done_nothing_shows_zeros() -> None:
    counted = values(StepCounters().metrics())
    assert counted["prompt_tokens_by_source_total local_cache_hit"] == counted["steps_total"] == 0


def test_handoffs_are_counted_by_how_long_they_took() -> None:
    times = HandoffTimes()
    times.count(HandoffFigures(num_blocks=1, num_bytes=1, transfer_us=50_000, exposed_us=200))
    times.count(HandoffFigures(num_blocks=1, num_bytes=1, transfer_us=100_000, exposed_us=20_000_000))
    counted = values(times.metrics())
    assert [counted[f"kv_transfer_seconds_bucket {edge}"] for edge in ("0.03", "0.1", "+Inf")] == [0, 2, 2]
    assert [counted[f"kv_exposed_seconds_bucket {edge}"] for edge in ("0.0001", "0.0003", "10.0", "+Inf")] == [
        0,
        1,
        1,
        2,
    ]
    assert counted["kv_transfer_seconds_sum"] == pytest.approx(0.15)
    assert counted["kv_exposed_seconds_count"] == 2
