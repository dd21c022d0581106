"""The router's metrics, under the names that other servers use.

Owns one Prometheus registry. TTFT, inter-token latency and end-to-end latency are taken where tokens leave the relay:
they include neither the network to the client nor detokenizing. Times inside the nodes come from the nodes' stamps.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import asdict
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from router.control import ControlLink
from router.flight import FlightFigures
from router.loop_lag import LoopLag
from router.metric_aliases import VllmAliases
from router.nodes import NodeRegistry
from router.relay import Relay
from router.request_trace import CURRENT_TRACE
from router.timings import ClientTimes, RelayTimes
from wire.messages import DECODE, PREFILL

_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_ITL_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_HANDOVER_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 240, 600)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

_RELAY_COUNTERS = {
    "num_requests": "Requests that were sent to nodes, one per choice",
    "num_finished": "Requests whose last token came from a node",
    "num_failed": "Requests that ended with an error",
    "num_cancelled": "Requests that were closed before their last token: a client left, or a stop string was found",
    "num_retries": "Attempts after the first one",
    "num_handoff_attempts": "Attempts whose prompt was given to a prefill node",
    "num_decode_only_attempts": "Attempts whose prompt was left to the decode node",
}


class RouterMetrics:
    """All metrics of one router."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._aliases = CollectorRegistry(auto_describe=False)
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "Time to first token", _TTFT_BUCKETS)
        self.tokens = TokenMetrics()
        self._registry.register(self.tokens)
        self.loop_lag = LoopLag()
        self._registry.register(self.loop_lag)
        self.e2e_latency = self._histogram("e2e_request_latency_seconds", "Time to the last token", _E2E_BUCKETS)
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "From sending the legs to the first step of the prompt", _TTFT_BUCKETS
        )
        self.admission_wait = self._histogram(
            "admission_wait_seconds", "Time in the router's queue, 0 for requests that found room", _TTFT_BUCKETS
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "From the first step of the prompt to token 1", _TTFT_BUCKETS
        )
        self.handover = self._histogram(
            "handover_seconds", "From sampling token 1 to writing it to the client's stream", _HANDOVER_BUCKETS
        )
        self.decode_time = self._histogram(
            "request_decode_time_seconds", "From token 1 to the last token, at the router", _E2E_BUCKETS
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first, by request", _ITL_BUCKETS
        )
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens by request", _TOKEN_BUCKETS
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens in the answer, by request", _TOKEN_BUCKETS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens")
        self.prefix_cache_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in a prefix cache")
        self.prefix_cache_hits = self._counter("prefix_cache_hits", "Prompt tokens found in a prefix cache")
        self.ignored_fields = self._counter("ignored_fields", "Requests with a field that was ignored", "field")
        self.successes = self._counter("request_success", "Finished requests", "finished_reason")

    def count_ignored(self, fields: Iterable[str]) -> None:
        """Record that a request carried `fields`, which were ignored. The caller keeps their number small."""
        for field in fields:
            self.ignored_fields.labels(field).inc()

    def streamed(self, client: ClientTimes, relay: RelayTimes) -> None:
        """Record a stream that ended without an error."""
        if relay.clock and relay.first is not None and client.first_written_us is not None:
            self.handover.observe((client.first_written_us - relay.first.sampled_us) / 1e6)

    def watch(self, relay: Relay, nodes: NodeRegistry, control: ControlLink) -> None:
        """Include the figures of the relay, the nodes and their connections."""
        self._registry.register(_RelayCollector(relay, control))
        self._registry.register(_NodesCollector(nodes))

    def add_vllm_aliases(self, model_name: str) -> None:
        """Show what vLLM has too under its names as well, with the label `model_name`."""
        self._aliases.register(VllmAliases(self._registry, model_name))

    def include(self, collector: Collector) -> None:
        """Include what another part of the router counts."""
        self._registry.register(collector)

    def render(self) -> bytes:
        """The text that `/metrics` answers."""
        return generate_latest(self._registry) + generate_latest(self._aliases)

    def _histogram(self, name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"baton:{name}", doc, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, doc: str, *labels: str) -> Counter:
        return Counter(f"baton:{name}", doc, labels, registry=self._registry)


class TokenMetrics(Collector):
    """Counts each token in plain numbers, because the counters of prometheus_client take five times as long."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._num_gaps = [0] * (len(_ITL_BUCKETS) + 1)
        self._sum_s = 0.0

    def gap(self, gap_s: float) -> None:
        """Record the time between a delivery and the one before it."""
        self._num_gaps[bisect_left(_ITL_BUCKETS, gap_s)] += 1
        self._sum_s += gap_s

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        yield CounterMetricFamily("baton:generation_tokens", "Tokens sent", self.num_tokens)
        bounds = [*map(floatToGoString, _ITL_BUCKETS), "+Inf"]
        buckets = [*zip(bounds, accumulate(self._num_gaps), strict=True)]
        yield HistogramMetricFamily("baton:inter_token_latency_seconds", "Gap between tokens", buckets, self._sum_s)


class RequestTimer:
    """Times one request from its construction."""

    def __init__(self, metrics: RouterMetrics, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._start_s = time.monotonic()
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._trace = CURRENT_TRACE.get()
        self._num_prompt_tokens = num_prompt_tokens
        metrics.prompt_tokens.inc(num_prompt_tokens)

    def tokens(self, count: int) -> None:
        """Record that `count` tokens were delivered together."""
        now_s = time.monotonic()
        if self._last_s is None:
            self._first_s = now_s
            self._metrics.time_to_first_token.observe(now_s - self._start_s)
            if self._trace is not None:
                self._trace.first_token(round(now_s * 1e6))
        else:
            self._metrics.tokens.gap(now_s - self._last_s)
        self._last_s = now_s
        self._metrics.tokens.num_tokens += count

    def finished(self, reason: str, figures: FlightFigures, num_tokens: int) -> None:
        """Record that the request ended without an error, with `num_tokens` in its answer."""
        metrics, times, now_s = self._metrics, figures.times, time.monotonic()
        metrics.e2e_latency.observe(now_s - self._start_s)
        if times.first is not None:
            metrics.prefill_time.observe((times.first.sampled_us - times.first.begun_us) / 1e6)
            if times.clock and times.sent_us is not None:
                metrics.queue_time.observe((times.first.begun_us - times.sent_us) / 1e6)
        if self._first_s is not None:
            metrics.decode_time.observe(now_s - self._first_s)
            if num_tokens > 1:
                metrics.time_per_output_token.observe((now_s - self._first_s) / (num_tokens - 1))
        metrics.request_prompt_tokens.observe(self._num_prompt_tokens)
        metrics.request_generation_tokens.observe(num_tokens)
        metrics.prefix_cache_queries.inc(self._num_prompt_tokens)
        metrics.prefix_cache_hits.inc(figures.num_cached_tokens)
        metrics.successes.labels(reason).inc()


class _RelayCollector(Collector):
    def __init__(self, relay: Relay, control: ControlLink) -> None:
        self._relay = relay
        self._control = control

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("baton:num_requests_running", "Requests in flight", self._relay.num_in_flight)
        for name, value in asdict(self._relay.counters).items():
            doc = _RELAY_COUNTERS.get(name, "Requests of the relay")
            yield CounterMetricFamily(f"baton:relay_{name.removeprefix('num_')}", doc, value)
        doc = "Messages of nodes that could not be understood"
        yield CounterMetricFamily("baton:rejected_messages", doc, self._control.num_rejected_messages)


class _NodesCollector(Collector):
    """Figures of nodes as of their last heartbeats, at most a few seconds old."""

    def __init__(self, nodes: NodeRegistry) -> None:
        self._nodes = nodes

    def collect(self) -> Iterable[Metric]:
        nodes, labels = self._nodes.all(), ["role", "node"]
        members = GaugeMetricFamily("baton:nodes", "Registered nodes", labels=["role"])
        for role in (PREFILL, DECODE):
            members.add_metric([role], sum(node.role == role for node in nodes))
        load = GaugeMetricFamily("baton:node_load", "Legs in flight", labels=labels)
        blocks = GaugeMetricFamily("baton:node_kv_blocks", "KV blocks by state", labels=[*labels, "state"])
        usage = GaugeMetricFamily("baton:kv_cache_usage_perc", "Share of KV blocks held, 0 to 1", labels=labels)
        for node in nodes:
            place, status, total = [node.role, node.node_id], node.status, node.hello.num_blocks
            load.add_metric(place, node.load)
            blocks.add_metric([*place, "free"], status.num_free_blocks)
            blocks.add_metric([*place, "cached"], status.num_cached_blocks)
            blocks.add_metric([*place, "held"], status.num_held_blocks)
            usage.add_metric(place, status.num_held_blocks / total if total else 0.0)
        yield from (members, load, blocks, usage)
        num_waiting = sum(node.status.num_waiting for node in nodes)
        yield GaugeMetricFamily("baton:num_requests_waiting", "Legs that wait for a step on a node", num_waiting)
