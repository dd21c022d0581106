"""What the routers measured lately: their metrics and nodes, looked at again and again, as one reading of the last
seconds.

Owns the window and what is computed over it. Knows the names of a router's metrics, and no decision. What several
routers have counted is added up; of a node each of them knows the load of all.
Invariants: a router that was started anew begins with an empty window; every question to it has a deadline.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from baton.launch.api_client import ApiClient
from baton.launch.cluster.policy import Load, Reading
from baton.wire.messages.membership import DECODE, PREFILL

QUEUE_TIME = "baton:request_queue_time_seconds"
TTFT = "baton:time_to_first_token_seconds"
GAP = "baton:inter_token_latency_seconds"
HELD_BACK = "baton:num_requests_queued"
_HISTOGRAMS = (QUEUE_TIME, TTFT, GAP)
_QUANTILE = 0.9
Buckets = Mapping[float, float]
"""Counts up to each bound, over all models."""


@dataclass(frozen=True, slots=True)
class Look:
    """The routers at one moment. `histograms` count from their start."""

    at_s: float
    histograms: Mapping[str, Buckets]
    num_held_back: float
    nodes: Sequence[Mapping[str, Any]]


class RouterView:
    """Looks at the routers of a deployment. `clients`, one for each, should have deadlines of seconds."""

    def __init__(self, clients: Sequence[ApiClient], window_s: float) -> None:
        self._clients = clients
        self._window_s = window_s
        self._looks: deque[Look] = deque()

    def look(self, now_s: float) -> None:
        """Ask all routers for their figures. Raises `RequestFailed`."""
        self.add(added_up([parse_look(each.metrics(), each.nodes(), now_s) for each in self._clients]))

    def add(self, look: Look) -> None:
        """Take a look into the window; those that are too old leave it."""
        if self._looks and _has_restarted(self._looks[-1], look):
            self._looks.clear()
        self._looks.append(look)
        while len(self._looks) > 2 and look.at_s - self._looks[1].at_s >= self._window_s:
            self._looks.popleft()

    @property
    def nodes(self) -> Sequence[Mapping[str, Any]]:
        """The nodes as the routers listed them at the last look."""
        return self._looks[-1].nodes if self._looks else ()

    def reading(self) -> Reading | None:
        """The measurements of the window; None as long as it is not full."""
        if not self._looks or self._looks[-1].at_s - self._looks[0].at_s < self._window_s:
            return None
        first, last = self._looks[0], self._looks[-1]
        quantiles = {name: quantile(_grown(first.histograms[name], last.histograms[name])) for name in _HISTOGRAMS}
        return Reading(
            window_s=last.at_s - first.at_s,
            queue_s=quantiles[QUEUE_TIME],
            ttft_s=quantiles[TTFT],
            tpot_s=quantiles[GAP],
            num_held_back=_mean([look.num_held_back for look in self._looks]),
            prefill=self._load(PREFILL),
            decode=self._load(DECODE),
        )

    def _load(self, role: str) -> Load:
        """Means over all looks."""
        loads = [_load([node for node in look.nodes if node.get("role") == role]) for look in self._looks]
        return Load(
            num_requests=_mean([load.num_requests for load in loads]),
            num_waiting=_mean([load.num_waiting for load in loads]),
            num_busy=_mean([load.num_busy for load in loads]),
            kv_share=_mean([load.kv_share for load in loads]),
            seqs_share=_mean([load.seqs_share for load in loads]),
        )


def parse_look(metrics: str, nodes: Sequence[Mapping[str, Any]], at_s: float) -> Look:
    """A look of the text of `/metrics` and the nodes of `/server_info`."""
    histograms: dict[str, dict[float, float]] = {name: {} for name in _HISTOGRAMS}
    num_held_back = 0.0
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            name = sample.name.removesuffix("_bucket")
            if name in histograms and "le" in sample.labels:
                bound = float(sample.labels["le"])
                histograms[name][bound] = histograms[name].get(bound, 0.0) + sample.value
            elif sample.name == HELD_BACK:
                num_held_back += sample.value
    return Look(at_s, histograms, num_held_back, nodes)


def added_up(looks: Sequence[Look]) -> Look:
    """The looks at several routers at one moment as one."""
    histograms: dict[str, dict[float, float]] = {name: {} for name in _HISTOGRAMS}
    nodes: dict[str, Mapping[str, Any]] = {}
    for look in looks:
        for name, buckets in look.histograms.items():
            for bound, count in buckets.items():
                histograms[name][bound] = histograms[name].get(bound, 0.0) + count
        nodes.update((str(node.get("id")), node) for node in look.nodes)
    return Look(looks[0].at_s, histograms, sum(look.num_held_back for look in looks), list(nodes.values()))


def quantile(buckets: Buckets, share: float = _QUANTILE) -> float | None:
    """The value that a `share` of all values does not exceed, interpolated within its bucket; None without values.
    Beyond the last bound it is that bound."""
    total = buckets.get(math.inf, 0.0)
    if total <= 0:
        return None
    below, lower = 0.0, 0.0
    for bound, count in sorted(buckets.items()):
        if count >= share * total:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (share * total - below) / (count - below)
        below, lower = count, bound
    return lower


def _grown(before: Buckets, after: Buckets) -> Buckets:
    return {bound: count - before.get(bound, 0.0) for bound, count in after.items()}


def _has_restarted(before: Look, after: Look) -> bool:
    """Whether a counter is smaller than it was."""
    return any(
        count < before.histograms[name].get(bound, 0.0)
        for name, buckets in after.histograms.items()
        for bound, count in buckets.items()
    )


def _load(nodes: Sequence[Mapping[str, Any]]) -> Load:
    if not nodes:
        return Load()
    loads = [_number(node, "load") for node in nodes]
    num_seqs = sum(_number(node, "max_num_seqs") for node in nodes)
    num_blocks = sum(_number(node, "num_blocks") for node in nodes)
    return Load(
        num_requests=sum(loads),
        num_waiting=sum(_number(node, "num_waiting") for node in nodes),
        num_busy=float(sum(load > 0 for load in loads)),
        kv_share=sum(_number(node, "num_held_blocks") for node in nodes) / num_blocks if num_blocks else 0.0,
        seqs_share=sum(_number(node, "num_running") for node in nodes) / num_seqs if num_seqs else 0.0,
    )


def _number(node: Mapping[str, Any], name: str) -> float:
    value = node.get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
