"""Shows what became of prompts of which another node had more: pulls by their end, and what they were expected to take.

Pulls that are `arrived` are the ones in the sums of tokens and seconds: expected and real ones are of the same pulls.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.router.routing.pulls import RESULTS, PullRecords


class PullMetrics(Collector):
    """The counts in `records`."""

    def __init__(self, records: PullRecords) -> None:
        self._records = records

    def collect(self) -> Iterable[Metric]:
        """All of them, 0 for what has not happened."""
        records = self._records
        pulls = CounterMetricFamily("baton:prefix_pulls", "Prefixes that were to be copied", labels=["result"])
        for result in RESULTS:
            pulls.add_metric([result], records.results[result])
        yield pulls
        yield CounterMetricFamily("baton:prefix_pull_tokens", "Tokens whose KV was copied", records.num_tokens)
        doc = "What the pulls that arrived were expected to take"
        yield CounterMetricFamily("baton:prefix_pull_expected_seconds", doc, records.expected_s)
        yield CounterMetricFamily("baton:prefix_pull_seconds", "What the pulls that arrived took", records.took_s)
        doc = "Prompts that stayed at a decode node, which had more of them than the node that was to compute them"
        yield CounterMetricFamily("baton:prefix_stays", doc, records.num_stays)
