from __future__ import annotations

import json
import re
from typing import Any

import pytest

from bench.client.outcome import Failure
from bench.serve.report import report
from bench.serve.result import as_json, middle_of
from tests.bench.serve.outcomes import answered, failed
from tests.bench.serve.results import result_of

DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"}
OUTCOMES = (
    answered([0.1, 0.25], sent_s=7.0, scheduled_s=6.5),
    failed(Failure.HTTP_ERROR, "503: busy", sent_s=8.0),
)


def test_details_are_only_there_when_asked_for() -> None:
    result = result_of(OUTCOMES, breakdown={"num_requests": 1, "requests": [{"index": 0}]})
    assert not as_json(result, detailed=False).keys() & DETAILS
    assert as_json(result, detailed=False)["breakdown"] == {"num_requests": 1}
    detailed = as_json(result, detailed=True)
    assert detailed.keys() >= DETAILS
    assert detailed["breakdown"]["requests"] == [{"index": 0}]
    assert json.loads(json.dumps(detailed)) == detailed


def test_lists_have_one_entry_per_request_failed_ones_too() -> None:
    found = as_json(result_of(OUTCOMES), detailed=True)
    assert found["ttfts"] == [0.1, 0.0]
    assert found["itls"] == [[0.15], []]
    assert found["latencies"] == [0.25, 0.0]
    assert found["start_times"] == [7.0, 8.0]
    assert found["queue_times"] == [0.5, 0.0]
    assert found["output_lens"] == [2, 0]
    assert found["generated_texts"] == ["xx", ""]
    assert found["errors"] == ["", "http error: 503: busy"]


def test_of_several_runs_the_middle_one_is_reported_with_the_range_of_all() -> None:
    results = [
        result_of([answered([first_s, first_s + 0.1])], seed=seed) for seed, first_s in enumerate((0.3, 0.1, 0.2))
    ]
    found = middle_of(results).summary
    assert found["seed"] == 2
    assert found["mean_ttft_ms"] == 200.0
    assert found["range"]["mean_ttft_ms"] == {"low": 100.0, "high": 300.0}
    assert [each["mean_ttft_ms"] for each in found["repeats"]] == [300.0, 100.0, 200.0]
    assert "repeat 3 of 3" in found["notes"][0]
    text = report(found, ("ttft",), (99.0,))
    assert re.search(r"^-+3 Repeats-+$", text, re.MULTILINE)
    assert re.search(r"^Range of median TTFT \(ms\):\s+100\.00 to 300\.00$", text, re.MULTILINE)
    assert len(re.findall(r"^Median TTFT \(ms\):", text, re.MULTILINE)) == 1


def test_a_run_in_which_all_failed_is_the_last_choice_and_in_no_range() -> None:
    results = [result_of([failed(Failure.STALLED)]), result_of([answered([0.2])]), result_of([answered([0.4])])]
    found = middle_of(results).summary
    assert found["mean_ttft_ms"] == 400.0
    assert found["range"]["mean_ttft_ms"] == {"low": 200.0, "high": 400.0}


def test_when_every_run_failed_there_is_no_range() -> None:
    found = middle_of([result_of([failed(Failure.STALLED)])] * 2).summary
    assert found["completed"] == 0
    assert found["range"] == {}


def test_a_single_run_is_left_as_it_is() -> None:
    result = result_of([answered([0.2])])
    assert middle_of([result]) is result


@pytest.mark.parametrize("name", ["facts", "dataset"])
def test_repeats_do_not_say_everything_again(name: str) -> None:
    found: dict[str, Any] = middle_of([result_of([answered([0.2])])] * 2).summary
    assert name in found
    assert all(name not in each for each in found["repeats"])
