from __future__ import annotations

from typing import Any

import pytest

from baton.bench.client.outcome import Failure, Outcome
from baton.bench.serve.metrics import summarise, timing_of
from tests.bench.serve.outcomes import answered, failed


def figures(outcomes: list[Outcome], duration_s: float = 10.0, **slo: float) -> dict[str, Any]:
    return summarise(outcomes, duration_s, slo)


def test_the_figures_of_three_requests_are_those_added_up_by_hand() -> None:
    found = figures(
        [
            answered([0.1, 0.2, 0.3], num_prompt=5),
            answered([0.3, 0.3, 0.6], num_prompt=7, sent_s=1.0),
            answered([0.2], num_prompt=3, sent_s=2.0),
        ]
    )
    assert (found["completed"], found["failed"]) == (3, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (15, 7)
    assert found["request_throughput"] == pytest.approx(0.3)
    assert found["output_throughput"] == pytest.approx(0.7)
    assert found["total_token_throughput"] == pytest.approx(2.2)
    assert (found["mean_ttft_ms"], found["median_ttft_ms"]) == (200.0, 200.0)
    assert found["std_ttft_ms"] == pytest.approx(81.650)
    assert found["p99_ttft_ms"] == pytest.approx(298.0)
    assert found["mean_tpot_ms"] == pytest.approx(125.0)
    assert found["mean_itl_ms"] == pytest.approx(125.0)
    assert found["median_itl_ms"] == pytest.approx(100.0)
    assert found["p90_itl_ms"] == pytest.approx(240.0)
    assert found["mean_max_itl_ms"] == pytest.approx(200.0)
    assert found["max_max_itl_ms"] == pytest.approx(300.0)
    assert found["mean_e2el_ms"] == pytest.approx(366.667)
    assert found["median_ttst_ms"] == pytest.approx(250.0)
    assert found["chunks_per_token"] == 1.0
    assert found["zero_gap_share"] == 0.25
    assert found["cached_tokens"] is None


def drafting(**drafts: Any) -> dict[str, Any]:
    """The part of a usage that tells of drafts."""
    return {"completion_tokens_details": {"drafts": drafts}}


def test_figures_of_drafts_are_of_all_methods_together_and_have_the_names_of_vllm() -> None:
    ngrams, model = {"steps": 2, "tokens": 6, "accepted": 4}, {"steps": 1, "tokens": 2, "accepted": 0}
    outcomes = [
        answered([0.1, 0.2], num_output=8, **drafting(ngram=ngrams, draft_model=model)),
        answered([0.1, 0.2], num_output=4, **drafting(ngram={"steps": 1, "tokens": 4, "accepted": 2})),
        answered([0.1, 0.2]),
        failed(Failure.STALLED),
    ]
    found = figures(outcomes)
    of_drafts = {name.removeprefix("spec_decode_"): found[name] for name in found if name.startswith("spec_decode_")}
    assert of_drafts == {
        "num_drafts": 4,
        "draft_tokens": 12,
        "accepted_tokens": 6,
        "acceptance_rate": 50.0,
        "acceptance_length": 2.5,
    }
    assert found["tokens_per_step"] == pytest.approx(14 / 8)


@pytest.mark.parametrize(
    "usage",
    [
        {},
        {"completion_tokens_details": 5},
        drafting(),
        drafting(ngram=5),
        drafting(ngram={"steps": "a"}),
        drafting(ngram={"steps": 3, "tokens": 1, "accepted": 0}),
        drafting(ngram={"steps": 1, "tokens": 9, "accepted": 9}),
    ],
)
def test_without_counts_that_can_be_there_are_no_figures_of_drafts(usage: dict[str, Any]) -> None:
    found = figures([answered([0.1, 0.2], **usage)])
    assert {found[name] for name in found if "spec_decode" in name or name == "tokens_per_step"} == {None}


def test_goodput_counts_good_requests_and_attainment_is_of_all_that_were_sent() -> None:
    outcomes = [answered([0.1, 0.2]), answered([0.4, 0.5]), answered([0.1, 0.9]), failed(Failure.STALLED)]
    found = figures(outcomes, ttft=200.0, tpot=150.0)
    assert found["request_goodput"] == pytest.approx(0.1)
    assert found["slo_attainment"] == pytest.approx(0.25)
    assert found["slo"] == {"ttft": 200.0, "tpot": 150.0}


def test_failed_requests_are_named_and_in_no_average() -> None:
    broken = failed(Failure.TRUNCATED, "gone", chunk_s=[50.0, 90.0])
    good = [answered([0.1, 0.2]), answered([0.3, 0.5], sent_s=1.0)]
    refused = [failed(Failure.HTTP_ERROR, "status 503"), failed(Failure.HTTP_ERROR, "status 503")]
    with_failures, without = figures([*good, broken, *refused]), figures(good)
    assert with_failures["failed"] == 3
    assert with_failures["failures"] == {"http error": 2, "stream ended without [DONE]": 1}
    assert with_failures["failure_messages"] == ["stream ended without [DONE]: gone", "http error: status 503"]
    different = {name for name, value in without.items() if with_failures[name] != value}
    assert different == {"failed", "failures", "failure_messages"}


def test_the_peaks_are_of_the_fullest_second_from_the_first_sending_on() -> None:
    found = figures(
        [
            answered([0.5, 0.9, 1.1], sent_s=50.0, chunk_tokens=[1, 3, 1]),
            answered([0.2, 0.3], sent_s=50.5),
            answered([0.1, 0.2], sent_s=52.5),
        ]
    )
    assert found["max_output_tokens_per_s"] == 6.0
    assert found["max_concurrent_requests"] == 2


def test_cached_tokens_are_added_up_where_the_server_tells() -> None:
    details = ({"cached_tokens": 4}, {"cached_tokens": 5}, None)
    assert figures([answered([0.1], prompt_tokens_details=each) for each in details])["cached_tokens"] == 9


def test_times_of_an_answer_are_what_the_definitions_say() -> None:
    timing = timing_of(answered([0.2, 0.25, 0.40, 0.45], sent_s=100.0))
    assert timing.ttft_s == pytest.approx(0.2)
    assert timing.e2el_s == pytest.approx(0.45)
    assert timing.tpot_s == pytest.approx(0.25 / 3)
    assert timing.ttst_s == pytest.approx(0.25)
    assert timing.gaps_s == pytest.approx((0.05, 0.15, 0.05))
    assert timing.max_gap_s == pytest.approx(0.15)


def test_an_answer_of_one_token_has_neither_tpot_nor_second_token_nor_gap() -> None:
    timing = timing_of(answered([0.2]))
    assert (timing.tpot_s, timing.ttst_s, timing.max_gap_s) == (None, None, None)
    assert timing.ttft_s == timing.e2el_s


def test_a_chunk_of_several_tokens_is_one_gap_but_all_its_tokens_count_in_tpot() -> None:
    timing = timing_of(answered([0.1, 0.5], chunk_tokens=[1, 4]))
    assert timing.gaps_s == pytest.approx((0.4,))
    assert timing.tpot_s == pytest.approx(0.1)


def test_tpot_uses_the_number_of_tokens_of_usage_where_chunks_do_not_tell() -> None:
    assert timing_of(answered([0.1, 0.5], num_output=5)).tpot_s == pytest.approx(0.1)
