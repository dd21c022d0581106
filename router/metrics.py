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

from router.nodes import NodeRegistry
from router.relay import Relay
from router.request_trace import CURRENT_TRACE
from router.timings import ClientTimes, RelayTimes
from wire.messages import DECODE, PREFILL

_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_ITL_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_HANDOVER_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 240, 600)


class RouterMetrics:
    """All metrics of one router."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "Time to first token", _TTFT_BUCKETS)
        self.tokens = TokenMetrics()
        self._registry.register(self.tokens)
        self.e2e_latency = self._histogram("e2e_request_latency_seconds", "Time to the last token", _E2E_BUCKETS)
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "From sending the legs to the first step of the prompt", _TTFT_BUCKETS
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "From the first step of the prompt to token 1", _TTFT_BUCKETS
        )
        self.handover = self._histogram(
            "handover_seconds", "From sampling token 1 to writing it to the client's stream", _HANDOVER_BUCKETS
        )
        self.prompt_tokens = Counter("baton:prompt_tokens", "Prompt tokens", registry=self._registry)
        self.ignored_fields = Counter(
            "baton:ignored_fields", "Requests with a field that was ignored", ["field"], registry=self._registry
        )
        self.successes = Counter(
            "baton:request_success", "Finished requests", ["finished_reason"], registry=self._registry
        )

    def count_ignored(self, fields: Iterable[str]) -> None:
        """Record that a request carried `fields`, which were ignored. The caller keeps their number small."""
        for field in fields:
            self.ignored_fields.labels(field).inc()

    def streamed(self, client: ClientTimes, relay: RelayTimes) -> None:
        """Record a stream that ended without an error."""
        if relay.clock and relay.first is not None and client.first_written_us is not None:
            self.handover.observe((client.first_written_us - relay.first.sampled_us) / 1e6)

    def watch(self, relay: Relay, nodes: NodeRegistry) -> None:
        """Include the figures of the relay and the nodes."""
        self._registry.register(_RelayCollector(relay, nodes))

    def render(self) -> bytes:
        """The text that `/metrics` answers."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"baton:{name}", doc, buckets=buckets, registry=self._registry)


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
        self._last_s: float | None = None
        self._trace = CURRENT_TRACE.get()
        metrics.prompt_tokens.inc(num_prompt_tokens)

    def tokens(self, count: int) -> None:
        """Record that `count` tokens were delivered together."""
        now_s = time.monotonic()
        if self._last_s is None:
            self._metrics.time_to_first_token.observe(now_s - self._start_s)
            if self._trace is not None:
                self._trace.first_token(round(now_s * 1e6))
        else:
            self._metrics.tokens.gap(now_s - self._last_s)
        self._last_s = now_s
        self._metrics.tokens.num_tokens += count

    def finished(self, reason: str, times: RelayTimes) -> None:
        """Record that the request ended without an error."""
        self._metrics.e2e_latency.observe(time.monotonic() - self._start_s)
        if times.first is not None:
            self._metrics.prefill_time.observe((times.first.sampled_us - times.first.begun_us) / 1e6)
            if times.clock and times.sent_us is not None:
                self._metrics.queue_time.observe((times.first.begun_us - times.sent_us) / 1e6)
        self._metrics.successes.labels(reason).inc()


class _RelayCollector(Collector):
    def __init__(self, relay: Relay, nodes: NodeRegistry) -> None:
        self._relay = relay
        self._nodes = nodes

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("baton:num_requests_running", "Requests in flight", self._relay.num_in_flight)
        members = GaugeMetricFamily("baton:nodes", "Registered nodes", labels=["role"])
        load = GaugeMetricFamily("baton:node_load", "Legs in flight", labels=["role", "node"])
        for role in (PREFILL, DECODE):
            nodes = [node for node in self._nodes.all() if node.role == role]
            members.add_metric([role], len(nodes))
            for node in nodes:
                load.add_metric([role, node.node_id], node.load)
        yield members
        yield load
        for name, value in asdict(self._relay.counters).items():
            yield CounterMetricFamily(f"baton:relay_{name.removeprefix('num_')}", "Requests of the relay", value)
