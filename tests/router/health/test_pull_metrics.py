"""Metrics of pulls: every result is shown, and sums are of those that arrived."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from baton.router.health.pull_metrics import PullMetrics
from baton.router.routing.pulls import RESULTS, PullRecords


def test_each_result_is_shown_from_the_beginning_on() -> None:
    records, registry = PullRecords(), CollectorRegistry()
    registry.register(PullMetrics(records))
    assert all(f'baton:prefix_pulls_total{{result="{result}"}} 0.0' in shown(registry) for result in RESULTS)
    records.results["late"] += 2
    records.expected_s, records.took_s, records.num_tokens, records.num_stays = 0.5, 0.25, 48, 3
    lines = {
        'baton:prefix_pulls_total{result="late"} 2.0',
        "baton:prefix_pull_expected_seconds_total 0.5",
        "baton:prefix_pull_seconds_total 0.25",
        "baton:prefix_pull_tokens_total 48.0",
        "baton:prefix_stays_total 3.0",
    }
    assert lines <= set(shown(registry))


def shown(registry: CollectorRegistry) -> list[str]:
    return generate_latest(registry).decode().splitlines()
