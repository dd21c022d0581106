"""The router's metrics, under the names that other servers use.

Owns one Prometheus registry. TTFT, inter-token latency and end-to-end latency are taken where tokens leave the relay:
they include neither the network to the client nor detokenizing. Times inside the nodes come from the nodes' stamps.
What has a model has the label `model_name`, with the names of served models only.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import cast

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.router.health.loop_lag import LoopLag
from baton.router.health.metric_aliases import MODEL_LABEL, VllmAliases
from baton.router.health.pull_metrics import PullMetrics
from baton.router.nodes.control import ControlLink
from baton.router.nodes.registry import Node, NodeRegistry
from baton.router.requests.figures import FlightFigures
from baton.router.requests.relay import Relay
from baton.router.requests.timings import ClientTimes, RelayTimes
from baton.router.requests.trace import CURRENT_TRACE
from baton.router.routing.goals import Attainment, Goals
from baton.runtime.draft_metrics import draft_metrics
from baton.wire.messages.membership import DECODE, PREFILL

_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_ITL_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_HANDOVER_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 240, 600)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_MAX_PLACES, _OTHER_PLACES = 16, "other"
"""Nodes name the tiers of their KV stores: those beyond the first few share a label."""

_RELAY_COUNTERS = {
    "num_requests": "Requests that were sent to nodes, one per choice",
    "num_finished": "Requests whose last token came from a node",
    "num_failed": "Requests that ended with an error",
    "num_cancelled": "Requests that were closed before their last token: a client left, or a stop string was found",
    "num_retries": "Attempts after the first one",
    "num_handoff_attempts": "Attempts whose prompt was given to a prefill node",
    "num_moves": "Requests that a leaving decode node handed over while they generated",
    "num_decode_only_attempts": "Attempts whose prompt was left to the decode node",
    "num_kept_prompts": "Those of them that a prefill node could have computed: the goals for latency decided",
}


class RouterMetrics:
    """All metrics of one router. `models`: the names of the served models; no other name becomes a label."""

    def __init__(self, models: Iterable[str]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._aliases = CollectorRegistry(auto_describe=False)
        families = _ModelFamilies(self._registry)
        self._of_model = {model: ModelMetrics(families, model) for model in models}
        self._registry.register(TokenMetrics({model: metrics.tokens for model, metrics in self._of_model.items()}))
        self.loop_lag = LoopLag()
        self._registry.register(self.loop_lag)
        doc = "Requests with a field that was ignored"
        self.ignored_fields = Counter("baton:ignored_fields", doc, ("field",), registry=self._registry)

    def of_model(self, model: str) -> ModelMetrics:
        """The metrics of requests for a served model. Raises `KeyError` for any other."""
        return self._of_model[model]

    def count_ignored(self, fields: Iterable[str]) -> None:
        """Record that a request carried `fields`, which were ignored. The caller keeps their number small."""
        for field in fields:
            self.ignored_fields.labels(field).inc()

    def watch(self, relay: Relay, nodes: NodeRegistry, control: ControlLink) -> None:
        """Include the figures of the relay, the nodes and their connections."""
        self._registry.register(_RelayCollector(relay, control, self._of_model))
        self._registry.register(_NodesCollector(nodes, self._of_model))
        self._registry.register(PullMetrics(relay.pulls))

    def add_vllm_aliases(self) -> None:
        """Show what vLLM has too under its names as well."""
        self._aliases.register(VllmAliases(self._registry))

    def include(self, collector: Collector) -> None:
        """Include what another part of the router counts."""
        self._registry.register(collector)

    def render(self) -> bytes:
        """The text that `/metrics` answers."""
        return _text_of(self._collected())

    async def render_aside(self) -> bytes:
        """The text that `/metrics` answers, written in a thread. With a thousand nodes, writing it here would hold up
        tokens for longer than all the rest of a scrape."""
        return await asyncio.to_thread(_text_of, self._collected())

    def _collected(self) -> list[_Collected]:
        return [_Collected([*registry.collect()]) for registry in (self._registry, self._aliases)]


@dataclass(frozen=True, slots=True)
class _Collected:
    """Metrics as of a moment, in the form of a registry of prometheus_client."""

    metrics: list[Metric]

    def collect(self) -> Iterable[Metric]:
        """The metrics, as a registry gives them."""
        return self.metrics


def _text_of(collected: Sequence[_Collected]) -> bytes:
    return b"".join(generate_latest(cast("CollectorRegistry", each)) for each in collected)


class _ModelFamilies:
    """Metrics with the label `model_name`. Each is made when the first model asks for it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._histograms: dict[str, Histogram] = {}
        self._counters: dict[str, Counter] = {}

    def histogram(self, name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
        if name not in self._histograms:
            labels, registry = (MODEL_LABEL,), self._registry
            self._histograms[name] = Histogram(f"baton:{name}", doc, labels, buckets=buckets, registry=registry)
        return self._histograms[name]

    def counter(self, name: str, doc: str, *labels: str) -> Counter:
        if name not in self._counters:
            self._counters[name] = Counter(f"baton:{name}", doc, (MODEL_LABEL, *labels), registry=self._registry)
        return self._counters[name]


class ModelMetrics:
    """The measurements of the requests for one model."""

    def __init__(self, families: _ModelFamilies, model: str) -> None:
        def histogram(name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
            return families.histogram(name, doc, buckets).labels(model)

        def counter(name: str, doc: str) -> Counter:
            return families.counter(name, doc).labels(model)

        self.tokens = TokenCounts()
        self.time_to_first_token = histogram("time_to_first_token_seconds", "Time to first token", _TTFT_BUCKETS)
        self.e2e_latency = histogram("e2e_request_latency_seconds", "Time to the last token", _E2E_BUCKETS)
        self.queue_time = histogram(
            "request_queue_time_seconds", "From sending the legs to the first step of the prompt", _TTFT_BUCKETS
        )
        self.admission_wait = histogram(
            "admission_wait_seconds", "Time in the router's queue, 0 for requests that found room", _TTFT_BUCKETS
        )
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "From the first step of the prompt to token 1", _TTFT_BUCKETS
        )
        self.handover = histogram(
            "handover_seconds", "From sampling token 1 to writing it to the client's stream", _HANDOVER_BUCKETS
        )
        self.decode_time = histogram(
            "request_decode_time_seconds", "From token 1 to the last token, at the router", _E2E_BUCKETS
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first, by request", _ITL_BUCKETS
        )
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens by request", _TOKEN_BUCKETS)
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Tokens in the answer, by request", _TOKEN_BUCKETS
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens")
        self.prefix_cache_queries = counter("prefix_cache_queries", "Prompt tokens looked up in a prefix cache")
        self.prefix_cache_hits = counter("prefix_cache_hits", "Prompt tokens found in a prefix cache")
        self._places = families.counter("cached_prompt_tokens", "Those tokens by place", "place")
        self._known_places: set[str] = set()
        self._successes = families.counter("request_success", "Finished requests", "finished_reason")
        self._model = model

    def cached(self, by_place: Mapping[str, int]) -> None:
        """Record where the cached tokens of a prompt came from."""
        for place, num_tokens in by_place.items():
            if len(self._known_places) < _MAX_PLACES:
                self._known_places.add(place)
            shown = place if place in self._known_places else _OTHER_PLACES
            self._places.labels(self._model, shown).inc(num_tokens)

    def succeeded(self, reason: str) -> None:
        """Record that a request ended without an error."""
        self._successes.labels(self._model, reason).inc()

    def streamed(self, client: ClientTimes, relay: RelayTimes) -> None:
        """Record a stream that ended without an error."""
        if relay.clock and relay.first is not None and client.first_written_us is not None:
            self.handover.observe((client.first_written_us - relay.first.sampled_us) / 1e6)


class TokenCounts:
    """Counts the tokens of one model in plain numbers, because the counters of prometheus_client take five times as
    long. `num_gaps` has one number for each bucket."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_gaps = [0] * (len(_ITL_BUCKETS) + 1)
        self.sum_s = 0.0

    def gap(self, gap_s: float) -> None:
        """Record the time between a delivery and the one before it."""
        self.num_gaps[bisect_left(_ITL_BUCKETS, gap_s)] += 1
        self.sum_s += gap_s


class TokenMetrics(Collector):
    """Shows the token counts of each model."""

    def __init__(self, counts: Mapping[str, TokenCounts]) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        """Tokens that were sent, and the gaps between them, of each model."""
        tokens = CounterMetricFamily("baton:generation_tokens", "Tokens sent", labels=[MODEL_LABEL])
        gaps = HistogramMetricFamily("baton:inter_token_latency_seconds", "Gap between tokens", labels=[MODEL_LABEL])
        bounds = [*map(floatToGoString, _ITL_BUCKETS), "+Inf"]
        for model, counts in self._counts.items():
            tokens.add_metric([model], counts.num_tokens)
            gaps.add_metric([model], [*zip(bounds, accumulate(counts.num_gaps), strict=True)], counts.sum_s)
        yield from (tokens, gaps)


class RequestTimer:
    """Times one request from its construction."""

    def __init__(
        self,
        metrics: ModelMetrics,
        num_prompt_tokens: int,
        attainment: Attainment | None = None,
        goals: Goals | None = None,
    ) -> None:
        self._metrics = metrics
        self._attainment = attainment
        self._goals = goals
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
            if self._attainment is not None:
                self._attainment.first(now_s - self._start_s, self._goals)
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
                if self._attainment is not None:
                    self._attainment.ended((now_s - self._first_s) / (num_tokens - 1), self._goals)
        metrics.request_prompt_tokens.observe(self._num_prompt_tokens)
        metrics.request_generation_tokens.observe(num_tokens)
        metrics.prefix_cache_queries.inc(self._num_prompt_tokens)
        metrics.prefix_cache_hits.inc(figures.num_cached_tokens)
        metrics.cached(figures.cached_by_place)
        metrics.succeeded(reason)


class _RelayCollector(Collector):
    def __init__(self, relay: Relay, control: ControlLink, models: Iterable[str]) -> None:
        self._relay = relay
        self._control = control
        self._models = models

    def collect(self) -> Iterable[Metric]:
        running = GaugeMetricFamily("baton:num_requests_running", "Requests in flight", labels=[MODEL_LABEL])
        in_flight = self._relay.count_by_model()
        for model in self._models:
            running.add_metric([model], in_flight[model])
        yield running
        for name, value in asdict(self._relay.counters).items():
            doc = _RELAY_COUNTERS.get(name, "Requests of the relay")
            yield CounterMetricFamily(f"baton:relay_{name.removeprefix('num_')}", doc, value)
        doc = "Times that a node was given no requests for a while, because it failed several in a row"
        yield CounterMetricFamily("baton:node_ejections", doc, self._relay.ejections.num_ejections)
        doc = "Messages of nodes that could not be understood"
        yield CounterMetricFamily("baton:rejected_messages", doc, self._control.num_rejected_messages)


class _NodesCollector(Collector):
    """Figures of nodes as of their last heartbeats, at most a few seconds old."""

    def __init__(self, nodes: NodeRegistry, models: Iterable[str]) -> None:
        self._nodes = nodes
        self._models = models

    def collect(self) -> Iterable[Metric]:
        labels = ["role", "node", MODEL_LABEL]
        load = GaugeMetricFamily("baton:node_load", "Legs in flight", labels=labels)
        blocks = GaugeMetricFamily("baton:node_kv_blocks", "KV blocks by state", labels=[*labels, "state"])
        usage = GaugeMetricFamily("baton:kv_cache_usage_perc", "Share of KV blocks held, 0 to 1", labels=labels)
        doc = "Requests that gave their blocks up and were computed again"
        preemptions = CounterMetricFamily("baton:num_preemptions", doc, labels=labels)
        doc = "1 for a node that is given no requests for a while, because it failed several in a row"
        ejected = GaugeMetricFamily("baton:node_ejected", doc, labels=labels)
        for node in self._nodes.all():
            place, status, total = [node.role, node.node_id, node.model], node.status, node.hello.num_blocks
            load.add_metric(place, node.load)
            blocks.add_metric([*place, "free"], status.num_free_blocks)
            blocks.add_metric([*place, "cached"], status.num_cached_blocks)
            blocks.add_metric([*place, "held"], status.num_held_blocks)
            usage.add_metric(place, status.num_held_blocks / total if total else 0.0)
            preemptions.add_metric(place, status.num_preemptions)
            ejected.add_metric(place, node.is_ejected)
        drafts = [((node.role, node.node_id, node.model), node.status.drafts) for node in self._nodes.all()]
        yield from (load, blocks, usage, preemptions, ejected, *draft_metrics(labels, drafts))
        yield from (*self._by_group(), *self._by_model())

    def _by_group(self) -> Iterable[Metric]:
        labels = ["role", "group", MODEL_LABEL]
        members = GaugeMetricFamily("baton:group_nodes", "Registered nodes of a group", labels=labels)
        load = GaugeMetricFamily("baton:group_load", "Legs in flight on the nodes of a group", labels=labels)
        loads: dict[tuple[str, str, str], list[int]] = {}
        for node in self._nodes.all():
            if node.hello.group:
                loads.setdefault((node.role, node.hello.group, node.model), []).append(node.load)
        for place, of_group in loads.items():
            members.add_metric(place, len(of_group))
            load.add_metric(place, sum(of_group))
        return (members, load)

    def _by_model(self) -> Iterable[Metric]:
        members = GaugeMetricFamily("baton:nodes", "Registered nodes", labels=["role", MODEL_LABEL])
        doc = "Legs that wait for a step on a node"
        waiting = GaugeMetricFamily("baton:num_requests_waiting", doc, labels=[MODEL_LABEL])
        doc = "Share of KV blocks held, 0 to 1, of the role whose nodes are fuller"
        usage = GaugeMetricFamily("baton:relay_kv_cache_usage_perc", doc, labels=[MODEL_LABEL])
        doc = "1; tokens of a block, and blocks of the role whose nodes have more"
        config = GaugeMetricFamily("baton:cache_config_info", doc, labels=["block_size", "num_gpu_blocks", MODEL_LABEL])
        for model in self._models:
            nodes = self._nodes.of_model(model)
            by_role = {role: [node for node in nodes if node.role == role] for role in (PREFILL, DECODE)}
            for role, of_role in by_role.items():
                members.add_metric([role, model], len(of_role))
            waiting.add_metric([model], sum(node.status.num_waiting for node in nodes))
            usage.add_metric([model], max(map(_usage, by_role.values())))
            if nodes:
                num_blocks = max(map(_num_blocks, by_role.values()))
                config.add_metric([str(nodes[0].hello.layout.block_size), str(num_blocks), model], 1)
        return (members, waiting, usage, config)


def _num_blocks(nodes: Iterable[Node]) -> int:
    return sum(node.hello.num_blocks for node in nodes)


def _usage(nodes: Sequence[Node]) -> float:
    """The share of the blocks of all these nodes that are held."""
    return sum(node.status.num_held_blocks for node in nodes) / max(1, _num_blocks(nodes))
