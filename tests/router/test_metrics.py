"""The metrics that are counted for each token read as those of prometheus_client do."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.metrics import RequestTimer, RouterMetrics, TokenMetrics

NAME = "baton:inter_token_latency_seconds"
GAPS_S = (0.001, 0.002, 0.0021, 0.4, 2.5, 9.0)


def _samples(text: bytes) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_gaps_fall_into_the_buckets_of_a_histogram() -> None:
    tokens = TokenMetrics()
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    ours.register(tokens)
    bounds = [float(bound) for name, *labels in _samples(generate_latest(ours)) for bound in labels]
    histogram = Histogram(NAME, "Gap between tokens", buckets=bounds, registry=theirs)
    for gap_s in GAPS_S:
        tokens.gap(gap_s)
        histogram.observe(gap_s)
    found = {key: value for key, value in _samples(generate_latest(ours)).items() if key[0].startswith(NAME)}
    assert found == _samples(generate_latest(theirs))


def test_the_first_token_has_no_gap() -> None:
    metrics = RouterMetrics()
    timer = RequestTimer(metrics, num_prompt_tokens=7)
    timer.tokens(1)
    timer.tokens(2)
    samples = _samples(metrics.render())
    assert samples["baton:generation_tokens_total",] == 3
    assert samples["baton:prompt_tokens_total",] == 7
    assert samples["baton:time_to_first_token_seconds_count",] == 1
    assert samples[f"{NAME}_count",] == 1
