"""The metrics of a router: what they count, and that vLLM's names show the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from baton.router.health.metric_aliases import VLLM_NAMES
from baton.router.health.metrics import RequestTimer, RouterMetrics, TokenCounts, TokenMetrics
from baton.router.http.openai.prompts import PromptMaker
from baton.wire.messages.membership import DECODE, PREFILL
from baton.wire.tiers import TierTokens
from tests.router.fake_node import FINGERPRINT, STATUS, answering
from tests.router.http_client import fetch, post_completion
from tests.router.rig import MODEL, Server, serving

NAME = "baton:inter_token_latency_seconds"
GAPS_S = (0.001, 0.002, 0.0021, 0.4, 2.5, 9.0)


@pytest.fixture
async def server(prompts: PromptMaker) -> AsyncIterator[Server]:
    async with serving(prompts) as running:
        yield running


async def _scraped(server: Server) -> dict[tuple[str, ...], float]:
    return _samples((await fetch(server, "GET", "/metrics")).body)


def _samples(text: bytes) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_gaps_fall_into_the_buckets_of_a_histogram() -> None:
    counts = TokenCounts()
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    ours.register(TokenMetrics({MODEL: counts}))
    keys = _samples(generate_latest(ours))
    bounds = [float(key[1]) for key in keys if key[0].endswith("_bucket")]
    histogram = Histogram(NAME, "Gap between tokens", ["model_name"], buckets=bounds, registry=theirs)
    for gap_s in GAPS_S:
        counts.gap(gap_s)
        histogram.labels(MODEL).observe(gap_s)
    found = {key: value for key, value in _samples(generate_latest(ours)).items() if key[0].startswith(NAME)}
    assert found == _samples(generate_latest(theirs))


def test_the_first_token_has_no_gap() -> None:
    metrics = RouterMetrics([MODEL])
    timer = RequestTimer(metrics.of_model(MODEL), num_prompt_tokens=7)
    timer.tokens(1)
    timer.tokens(2)
    samples = _samples(metrics.render())
    assert samples["baton:generation_tokens_total", MODEL] == 3
    assert samples["baton:prompt_tokens_total", MODEL] == 7
    assert samples["baton:time_to_first_token_seconds_count", MODEL] == 1
    assert samples[f"{NAME}_count", MODEL] == 1


async def test_requests_are_measured_by_their_tokens_and_times(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(answering(prompts.tokenizer.encode("abc"), "length"))
    usage = (await post_completion(server)).json()["usage"]
    samples = await _scraped(server)
    for name in ("request_decode_time_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds"):
        assert samples[f"baton:{name}_count", MODEL] == 1
    assert samples["baton:request_prompt_tokens_sum", MODEL] == usage["prompt_tokens"]
    assert samples["baton:request_generation_tokens_sum", MODEL] == usage["completion_tokens"] == 3
    assert samples["baton:relay_handoff_attempts_total",] == 1
    assert samples["baton:relay_decode_only_attempts_total",] == 0


async def test_an_answer_of_one_token_has_no_time_per_token(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(answering(prompts.tokenizer.encode("a")[:1], "length"))
    await post_completion(server)
    samples = await _scraped(server)
    assert samples["baton:request_time_per_output_token_seconds_count", MODEL] == 0
    assert samples["baton:request_decode_time_seconds_count", MODEL] == 1


async def test_the_prefix_cache_counts_tokens_asked_for_and_found(server: Server) -> None:
    tiers = (TierTokens("host", 4),)
    await server.rig.join(DECODE, lambda node, leg: node.emit(leg, [5], finish="length", cached=6, tiers=tiers))
    usage = (await post_completion(server)).json()["usage"]
    samples = await _scraped(server)
    by_place = [samples["baton:cached_prompt_tokens_total", MODEL, place] for place in ("decode", "host")]
    assert by_place == [2, 4]
    assert samples["baton:prefix_cache_queries_total", MODEL] == usage["prompt_tokens"] > 6
    assert samples["baton:prefix_cache_hits_total", MODEL] == 6


def test_nodes_cannot_make_labels_without_end() -> None:
    metrics = RouterMetrics([MODEL])
    for number in range(100):
        metrics.of_model(MODEL).cached({str(number): 1})
    found = {key[2]: value for key, value in _samples(metrics.render()).items() if "cached_prompt" in key[0]}
    assert found == {**{str(number): 1 for number in range(16)}, "other": 84}


async def test_nodes_are_shown_as_they_last_reported(server: Server) -> None:
    busy = replace(
        STATUS, num_waiting=3, num_free_blocks=16, num_cached_blocks=32, num_held_blocks=16, num_preemptions=4
    )
    decode = await server.rig.join(DECODE, status=busy)
    await server.rig.join(PREFILL, status=replace(busy, num_waiting=2))
    samples = await _scraped(server)
    place = (MODEL, decode.hello.node_id, "decode")  # labels by name
    assert samples["baton:num_requests_waiting", MODEL] == 5
    assert samples["baton:kv_cache_usage_perc", *place] == 0.25
    assert [samples["baton:node_kv_blocks", *place, state] for state in ("free", "cached", "held")] == [16, 32, 16]
    assert samples["baton:node_load", *place] == 0
    assert samples["baton:num_preemptions_total", *place] == 4
    by_method = ("ngram", *place)
    names = ("drafts", "draft_tokens", "accepted_tokens")
    assert [samples[f"baton:spec_decode_num_{name}_total", *by_method] for name in names] == [4, 7, 3]
    of_first = ("ngram", MODEL, decode.hello.node_id, "0", "decode")
    assert samples["baton:spec_decode_num_accepted_tokens_per_pos_total", *of_first] == 2
    assert (samples["baton:nodes", MODEL, "decode"], samples["baton:nodes", MODEL, "prefill"]) == (1, 1)


async def test_the_nodes_of_a_group_are_counted_together(server: Server) -> None:
    for role, group in ((DECODE, "rack"), (DECODE, "rack"), (PREFILL, "rack"), (DECODE, "")):
        await server.rig.join(role, group=group)
    samples = await _scraped(server)
    assert samples["baton:group_nodes", "rack", MODEL, "decode"] == 2
    assert samples["baton:group_nodes", "rack", MODEL, "prefill"] == 1
    assert samples["baton:group_load", "rack", MODEL, "decode"] == 0
    assert ("baton:group_nodes", "", MODEL, "decode") not in samples


async def test_each_model_has_figures_of_its_own(prompts: PromptMaker) -> None:
    async with serving(prompts, models={"one": FINGERPRINT, "other": "1234"}) as server:
        await server.rig.join(DECODE, answering(prompts.tokenizer.encode("abc"), "length"))
        await post_completion(server, model="one")
        assert (await post_completion(server, model="neither")).status == 404
        samples = await _scraped(server)
    counted = (
        "prompt_tokens_total",
        "generation_tokens_total",
        "e2e_request_latency_seconds_count",
        f"{NAME[6:]}_count",
    )
    for name in counted:
        assert samples[f"baton:{name}", "one"] > 0 == samples[f"baton:{name}", "other"]
    assert (samples["baton:nodes", "one", "decode"], samples["baton:nodes", "other", "decode"]) == (1, 0)
    assert samples["baton:request_success_total", "length", "one"] == 1
    assert not [key for key in samples if "neither" in key]


async def test_requests_in_flight_are_counted_by_model(server: Server) -> None:
    await server.rig.join(DECODE, lambda node, leg: None)
    asked = asyncio.create_task(post_completion(server))
    await server.rig.has_in_flight(1)
    assert (await _scraped(server))["baton:num_requests_running", MODEL] == 1
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


async def test_messages_of_nodes_that_make_no_sense_are_counted(server: Server) -> None:
    decode = await server.rig.join(DECODE)
    decode.send_raw(b"nonsense")
    await server.rig.has_heard(decode)
    assert (await _scraped(server))["baton:rejected_messages_total",] == 1


async def test_vllm_names_show_the_same_values_with_the_name_of_the_model(server: Server, prompts: PromptMaker) -> None:
    prefill, decode = await server.rig.pair(answering(prompts.tokenizer.encode("abc"), "length"))
    await post_completion(server)
    assert not [key for key in await _scraped(server) if key[0].startswith("vllm:")]
    server.metrics.add_vllm_aliases()
    text = (await fetch(server, "GET", "/metrics")).body.decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name, aliases in VLLM_NAMES.items():
        for alias in aliases:
            assert families[alias].type == families[name].type
            assert _values(families[alias]) == _values(families[name])
            assert {sample.labels["model_name"] for sample in families[alias].samples} == {MODEL}
    engines = {sample.labels["engine"] for sample in families["vllm:num_preemptions"].samples}
    assert engines == {prefill.hello.node_id, decode.hello.node_id}
    reasons = {sample.labels.get("finished_reason") for sample in families["vllm:request_success"].samples}
    assert reasons == {"length"}


async def test_an_endpoint_picker_finds_one_figure_for_the_whole_relay(server: Server) -> None:
    """It takes the first sample of a name, whatever its labels."""
    server.metrics.add_vllm_aliases()
    assert not [key for key in await _scraped(server) if key[0] == "vllm:cache_config_info"]
    for role, num_held in ((PREFILL, 4), (PREFILL, 0), (DECODE, 2), (DECODE, 8), (DECODE, 5)):
        status = replace(STATUS, num_held_blocks=num_held, num_free_blocks=10 - num_held, num_cached_blocks=0)
        await server.rig.join(role, status=status, num_blocks=10)
    text = (await fetch(server, "GET", "/metrics")).body.decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
        assert _values(families[f"vllm:{name}"]) == [15 / 30]
    (sample,) = families["vllm:cache_config_info"].samples
    assert (sample.labels["block_size"], sample.labels["num_gpu_blocks"]) == ("4", "30")
    for name in ("num_requests_waiting", "num_requests_running"):
        assert len(families[f"vllm:{name}"].samples) == 1


def _values(family: Metric) -> list[float]:
    return [sample.value for sample in family.samples if not sample.name.endswith("_created")]
