"""The metrics of a node.

Owns the metrics that every node has and those of handoffs that it received. The figures of single legs come from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Protocol

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.engine.cache.offload import KvOffload
from baton.engine.scheduler.step import RequestOutput
from baton.engine.scheduler.step_costs import StepCosts
from baton.runtime.draft_metrics import draft_metrics
from baton.wire.messages.membership import NodeStatus
from baton.wire.messages.output import HandoffFigures

_LOCAL_CACHE, _TRANSFER = "local_cache_hit", "external_kv_transfer"
_HANDOFF_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class NodeCollector(Collector):
    """Asks the engine and the leg for their figures at each scrape."""

    def __init__(
        self,
        status: Callable[[], NodeStatus],
        costs: StepCosts,
        undrafted: Mapping[str, int],
        leg_metrics: Callable[[], Iterable[Metric]],
    ) -> None:
        """`undrafted`: requests that get no drafts, by reason."""
        self._status = status
        self._costs = costs
        self._undrafted = undrafted
        self._leg_metrics = leg_metrics

    def collect(self) -> Iterable[Metric]:
        """All metrics of this node."""
        status = self._status()
        yield GaugeMetricFamily("baton:num_requests_running", "Requests in the running batch", status.num_running)
        yield GaugeMetricFamily("baton:num_requests_waiting", "Requests waiting for a step", status.num_waiting)
        blocks = GaugeMetricFamily("baton:kv_blocks", "KV blocks by state; the sum is constant", labels=["state"])
        blocks.add_metric(["free"], status.num_free_blocks)
        blocks.add_metric(["cached"], status.num_cached_blocks)
        blocks.add_metric(["held"], status.num_held_blocks)
        yield blocks
        total = status.num_free_blocks + status.num_cached_blocks + status.num_held_blocks
        usage = status.num_held_blocks / total if total else 0.0
        yield GaugeMetricFamily("baton:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", usage)
        yield CounterMetricFamily("baton:num_preemptions", "Requests computed again", status.num_preemptions)
        yield from self._step_costs()
        yield from draft_metrics((), [((), status.drafts)])
        doc = "Requests that got no drafts"
        undrafted = CounterMetricFamily("baton:undrafted_requests", doc, labels=["reason"])
        for reason, count in list(self._undrafted.items()):
            undrafted.add_metric([reason], count)
        yield undrafted
        yield from self._leg_metrics()

    def _step_costs(self) -> Iterable[Metric]:
        parts = GaugeMetricFamily("baton:step_cost_seconds", "Fitted time of a step, by what is in it", labels=["part"])
        for part, seconds in asdict(self._costs.cost).items() if self._costs.cost is not None else ():
            parts.add_metric([part.removesuffix("_s")], seconds)
        yield parts
        doc = "How far predictions of steps were off lately, as a share of the step"
        yield GaugeMetricFamily("baton:step_cost_relative_error", doc, self._costs.relative_error)


class CountsRejections(Protocol):
    """A link that counts messages it could not understand."""

    @property
    def num_rejected_messages(self) -> int:
        """The number of rejected messages since the start of the node."""
        ...


class LinkCollector(Collector):
    """Figures of the connections to routers."""

    def __init__(self, link: CountsRejections) -> None:
        self._link = link

    def collect(self) -> Iterable[Metric]:
        """The count of messages of this router that were refused."""
        doc = "Messages of routers that were not understood, or not acted on"
        yield CounterMetricFamily("baton:rejected_messages", doc, self._link.num_rejected_messages)


class OffloadCollector(Collector):
    """Figures of a KV store."""

    def __init__(self, offload: KvOffload) -> None:
        self._offload = offload

    def collect(self) -> Iterable[Metric]:
        """The figures of the KV store: tokens that it was asked for, times of loads, blocks by what became of them,
        faults, and how full it is."""
        counted = self._offload.counters
        doc = "Prompt tokens that the KV store was asked for, and those whose KV it has loaded"
        yield CounterMetricFamily("baton:external_prefix_cache_queries", doc, counted.num_queried_tokens)
        yield CounterMetricFamily("baton:external_prefix_cache_hits", doc, counted.num_loaded_tokens)
        doc = "Prompt tokens that the KV store has, and that were computed because that was expected to be sooner"
        yield CounterMetricFamily("baton:kv_load_refused_tokens", doc, counted.num_refused_tokens)
        seconds = CounterMetricFamily("baton:kv_load_seconds", "Of whole loads from the KV store", labels=["kind"])
        seconds.add_metric(["taken"], counted.loading_s)
        seconds.add_metric(["expected"], counted.expected_s)
        seconds.add_metric(["computing"], counted.computing_s)
        yield seconds
        blocks = CounterMetricFamily("baton:kv_offload_blocks", "Evicted blocks: stored or dropped", labels=["end"])
        blocks.add_metric(["stored"], counted.num_stored_blocks)
        blocks.add_metric(["dropped"], counted.num_dropped_blocks)
        yield blocks
        faults = CounterMetricFamily("baton:kv_offload_faults", "Faults of the KV store", labels=["reason"])
        faults.add_metric(["failed"], self._offload.num_failures)
        faults.add_metric(["late"], counted.num_late_loads)
        faults.add_metric(["damaged"], counted.num_damaged_blocks)
        yield faults
        yield GaugeMetricFamily("baton:kv_offload_cache_usage_perc", "How full it is, 0 to 1", self._offload.usage)
        yield from self._tiers()

    def _tiers(self) -> Iterable[Metric]:
        blocks = CounterMetricFamily("baton:kv_tier_blocks", "Blocks of a tier", labels=["tier", "end"])
        moved = CounterMetricFamily("baton:kv_tier_bytes", "Bytes of blocks of a tier", labels=["tier", "end"])
        faults = CounterMetricFamily("baton:kv_tier_faults", "Faults of a tier", labels=["tier", "reason"])
        rests = CounterMetricFamily("baton:kv_tier_rests", "Times that a tier was left alone", labels=["tier"])
        usage = GaugeMetricFamily("baton:kv_tier_usage_perc", "How full a tier is, 0 to 1", labels=["tier"])
        for tier in self._offload.tiers:
            counted, block_bytes = tier.counters, self._offload.block_bytes
            for end, count in (("stored", counted.num_stored_blocks), ("loaded", counted.num_loaded_blocks)):
                blocks.add_metric([tier.name, end], count)
                moved.add_metric([tier.name, end], count * block_bytes)
            blocks.add_metric([tier.name, "dropped"], counted.num_dropped_blocks)
            faults.add_metric([tier.name, "failed"], counted.num_failures)
            faults.add_metric([tier.name, "silent"], counted.num_silent_loads)
            faults.add_metric([tier.name, "damaged"], counted.num_damaged_blocks)
            rests.add_metric([tier.name], counted.num_rests)
            usage.add_metric([tier.name], tier.usage)
        yield from (blocks, moved, faults, rests, usage)


class StepCounters:
    """Steps, and tokens by where their KV came from, each prompt token once."""

    def __init__(self) -> None:
        self._prompt = Counter(
            "baton:prompt_tokens_by_source", "Prompt tokens by origin of their KV", ["source"], registry=None
        )
        self._cached, self._transferred = self._prompt.labels(_LOCAL_CACHE), self._prompt.labels(_TRANSFER)
        self._computed = Counter("baton:computed_tokens", "Tokens computed in steps", registry=None)
        self._generated = Counter("baton:generation_tokens", "Tokens of outputs", registry=None)
        self._forced = Counter("baton:forced_tokens", "Tokens of outputs that a grammar forced", registry=None)
        self._steps = Counter("baton:steps", "Steps computed", registry=None)

    def count(self, outputs: Sequence[RequestOutput], *, is_step: bool = True) -> None:
        """Count one step, or if that is counted elsewhere some of its outputs."""
        self._steps.inc(is_step)
        self._computed.inc(sum([output.num_step_tokens for output in outputs]))
        self._generated.inc(sum([len(output.tokens) for output in outputs]))
        if num_forced := sum([output.num_forced for output in outputs]):
            self._forced.inc(num_forced)
        firsts = [output for output in outputs if output.output_index == 0 and output.tokens]
        if num_cached := sum([output.num_cached_tokens for output in firsts]):
            self._cached.inc(num_cached)

    def count_delivered(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Count the prompt of a handoff: all of its tokens were transferred, except those that were cached here."""
        self._transferred.inc(num_tokens - num_cached_tokens)
        self._cached.inc(num_cached_tokens)

    def metrics(self) -> Iterable[Metric]:
        """The counts as metrics of Prometheus."""
        for counter in (self._prompt, self._computed, self._generated, self._forced, self._steps):
            yield from counter.collect()


class HandoffTimes:
    """Histograms of the duration of handoffs: the whole, and the part after the prompt was computed."""

    def __init__(self) -> None:
        self._transfer = Histogram(
            "baton:kv_transfer_seconds",
            "Time of a handoff from its grant to verified blocks",
            buckets=_HANDOFF_BUCKETS_S,
            registry=None,
        )
        self._exposed = Histogram(
            "baton:kv_exposed_seconds",
            "Part of a handoff that came after the prompt was computed",
            buckets=_HANDOFF_BUCKETS_S,
            registry=None,
        )

    def count(self, figures: HandoffFigures) -> None:
        """Count one handoff."""
        self._transfer.observe(figures.transfer_us / 1e6)
        self._exposed.observe(figures.exposed_us / 1e6)

    def metrics(self) -> Iterable[Metric]:
        """Both histograms, in seconds."""
        yield from self._transfer.collect()
        yield from self._exposed.collect()


def counters_as_metrics(prefix: str, help_text: str, counters: dict[str, int]) -> Iterable[Metric]:
    """One Prometheus counter per entry; a leading "num_" is dropped from names."""
    for name, value in counters.items():
        yield CounterMetricFamily(f"{prefix}{name.removeprefix('num_')}", help_text, value)
