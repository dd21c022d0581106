"""Step results in the router's words, and the token counts every node reports."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from engine.scheduler.request import RequestOutput
from wire.errors import BatonError, RequestFailed
from wire.messages import HandoffFigures, StepTimes, TokenEvent


def failure_of(output: RequestOutput) -> BatonError:
    """Why a request with `has_failed` left without its token."""
    return RequestFailed(f"the model computed no number for output {output.output_index}", "not_a_number")


def token_event(output: RequestOutput, times: StepTimes | None = None) -> TokenEvent | None:
    """The token that a step drew for a router's request, or None when it drew none."""
    if output.token is None:
        return None
    handoff_id, attempt = output.key
    token_id, logprobs = output.token
    return TokenEvent(
        handoff_id,
        attempt,
        output.output_index,
        (token_id,),
        () if logprobs is None else (logprobs,),
        output.finish_reason,
        output.num_cached_tokens,
        times=times,
    )


@dataclass(slots=True)
class StepCounters:
    """Tokens by where their KV came from, each prompt token once."""

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_transferred_tokens: int = 0
    num_generated_tokens: int = 0

    def count(self, outputs: Sequence[RequestOutput]) -> None:
        """Add one step."""
        self.num_steps += 1
        for output in outputs:
            self.num_computed_tokens += output.num_step_tokens
            if output.token is not None:
                self.num_generated_tokens += 1
                if output.output_index == 0:
                    self.num_cached_tokens += output.num_cached_tokens

    def metrics(self) -> Iterable[Metric]:
        """As Prometheus counters."""
        prompt = CounterMetricFamily(
            "baton:prompt_tokens_by_source", "Prompt tokens by origin of their KV", labels=["source"]
        )
        prompt.add_metric(["local_cache_hit"], self.num_cached_tokens)
        prompt.add_metric(["external_kv_transfer"], self.num_transferred_tokens)
        yield prompt
        yield CounterMetricFamily("baton:computed_tokens", "Tokens computed in steps", self.num_computed_tokens)
        yield CounterMetricFamily("baton:generation_tokens", "Tokens drawn", self.num_generated_tokens)
        yield CounterMetricFamily("baton:steps", "Steps computed", self.num_steps)


_BOUNDS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(slots=True)
class HandoffTimes:
    """How long handoffs took, as Prometheus histograms: the whole, and the part after the prompt was computed."""

    transfer: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS_S) + 1))
    exposed: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS_S) + 1))
    transfer_us: int = 0
    exposed_us: int = 0

    def count(self, figures: HandoffFigures) -> None:
        """Add one handoff."""
        self.transfer[bisect_left(_BOUNDS_S, figures.transfer_us / 1e6)] += 1
        self.exposed[bisect_left(_BOUNDS_S, figures.exposed_us / 1e6)] += 1
        self.transfer_us += figures.transfer_us
        self.exposed_us += figures.exposed_us

    def metrics(self) -> Iterable[Metric]:
        """Both histograms, in seconds."""
        help_text = "Time of a handoff from its grant to verified blocks"
        yield _histogram("baton:kv_transfer_seconds", help_text, self.transfer, self.transfer_us)
        help_text = "Part of a handoff that came after the prompt was computed"
        yield _histogram("baton:kv_exposed_seconds", help_text, self.exposed, self.exposed_us)


def _histogram(name: str, help_text: str, counts: Sequence[int], sum_us: int) -> Metric:
    edges = [*(str(bound) for bound in _BOUNDS_S), "+Inf"]
    buckets = [(edge, float(total)) for edge, total in zip(edges, accumulate(counts), strict=True)]
    return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=sum_us / 1e6)


def counters_as_metrics(prefix: str, help_text: str, counters: dict[str, int]) -> Iterable[Metric]:
    """One Prometheus counter per entry; a leading "num_" is dropped from names."""
    for name, value in counters.items():
        yield CounterMetricFamily(f"{prefix}{name.removeprefix('num_')}", help_text, value)
