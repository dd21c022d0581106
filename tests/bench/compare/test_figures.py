from __future__ import annotations

import pytest

from baton.bench.compare.command import conclude, report
from baton.bench.compare.verdict import medians_of, ratios_of
from baton.bench.documents import CompareDocument, MeasuredTarget
from baton.bench.runs import Ratio, Run
from tests.bench.compare.results import run
from tests.bench.report.samples import FACTS

REFERENCE = [run("a", number, value) for number, value in enumerate((100, 104, 101), 1)]
SUBJECT = [run("b", number, value) for number, value in enumerate((50, 52, 48), 1)]


def ratios(runs: list[Run], control: list[Run]) -> dict[str, Ratio]:
    return {ratio.metric: ratio for ratio in ratios_of(("a", "b"), runs, control)}


def test_medians_are_over_the_rounds_of_one_target_at_one_rate() -> None:
    runs = [*REFERENCE, *SUBJECT, run("a", 1, 400, rate=2.0)]
    found = {(entry["rate"], entry["target"]): entry for entry in medians_of(("a", "b"), runs)}
    assert found[1.0, "a"]["median_ttft_ms"] == 101
    assert found[1.0, "b"]["p99_itl_ms"] == 50
    assert (found[1.0, "b"]["rounds"], found[1.0, "b"]["num_requests"]) == (3, 60)
    assert found[2.0, "a"]["median_ttft_ms"] == 400
    assert (2.0, "b") not in found


def test_a_run_without_an_answer_is_in_no_median() -> None:
    runs = [*SUBJECT[:2], run("b", 3, 0.001, failed=20, completed=0)]
    (found,) = medians_of(("b",), runs)
    assert found["median_ttft_ms"] == 51
    assert (found["failed"], found["num_requests"]) == (20, 60)


def test_ratios_are_against_the_first_target_round_by_round() -> None:
    found = ratios([*SUBJECT[::-1], *REFERENCE], [])
    ttft = found["median_ttft_ms"]
    assert (ttft.target, ttft.against, ttft.rate) == ("b", "a", 1.0)
    assert ttft.ratio == pytest.approx(50 / 101)
    assert ttft.high == 0.5
    assert ttft.verdict.endswith("faster")
    assert found["output_throughput"].verdict.endswith("more")
    assert found["slo_attainment"].verdict == "no verdict: there is no difference"


def test_the_control_is_noise() -> None:
    control = [run("a", number, value) for number, value in enumerate((100, 104, 250), 1)]
    found = ratios([*REFERENCE, *SUBJECT], control)["median_ttft_ms"]
    assert found.noise == pytest.approx(250 / 101 - 1)
    assert not found.is_clear


def test_a_target_that_drops_requests_is_not_called_faster() -> None:
    failing = [run("b", number, 50, failed=3, completed=17, attainment=0.5) for number in (1, 2, 3)]
    found = ratios([*REFERENCE, *failing], [])
    assert found["median_ttft_ms"].verdict == "no verdict: 9 of 60 requests to b failed"
    assert found["slo_attainment"].verdict == "2.00x (2.00 - 2.00) less"


def test_what_is_zero_or_missing_has_no_ratio() -> None:
    nothing = [run("b", number, 50, attainment=None if number > 1 else 0.0) for number in (1, 2, 3)]
    found = ratios([*REFERENCE, *nothing], [])
    assert "slo_attainment" not in found
    assert "median_ttft_ms" in found


def test_the_report_has_medians_verdicts_failures_and_the_rule() -> None:
    noted = run("a", 1, 100)
    noted.result["notes"] = ["the client used a whole core"]
    targets = [MeasuredTarget("a"), MeasuredTarget("b")]
    document = CompareDocument(facts=FACTS, targets=targets, runs=[noted, *REFERENCE[1:], *SUBJECT], ratios=[])
    conclude(document)
    shown = report(document)
    for said in ("**1 request/s**", "| TTFT p50 (ms) ", "0 of 60", "faster", "Medians of 3 rounds"):
        assert said in shown
    assert "A verdict needs 3 rounds" in shown
    assert "note: a, 1 request/s: the client used a whole core" in shown
    assert len({len(line) for line in shown.splitlines() if line.startswith("|")}) == 1
