from __future__ import annotations

import copy
from typing import Any

import pytest

from baton.bench.compare.command import CompareSettings, carry_out, keep_whole_groups, schedule_of
from baton.bench.documents import CompareDocument, MeasuredTarget
from tests.bench.targets.fakes import FakeLineUp, FakeMeasure, fake_session

INF = float("inf")


def measure_all(
    measure: FakeMeasure, document: CompareDocument | None = None, *, detail: str = "last", num_before: int = 0
) -> tuple[CompareDocument, list[Any]]:
    """The document, and what was saved."""
    session = fake_session(CompareSettings, "--rates=1,inf", "--num-prompts=20", f"--detail={detail}")
    targets = [MeasuredTarget("a"), MeasuredTarget("b")]
    found = copy.deepcopy(document) or CompareDocument(facts=session.facts, targets=targets, runs=[], ratios=[])
    schedule = schedule_of(session, num_before)
    steps = schedule.steps(keep_whole_groups(found, schedule))
    try:
        carry_out(found, steps, session, FakeLineUp().as_line_up(), measure)
    except KeyboardInterrupt:
        found = session.saved[-1]
    return found, session.saved


def test_every_load_goes_to_its_target_and_its_result_into_the_file() -> None:
    measure = FakeMeasure(lambda load: 50.0 if load.url == "fake:b" else 100.0)
    document, saved = measure_all(measure)
    assert {(run.target, run.round, run.rate) for run in document.runs} == {
        (target, number, rate) for target in ("a", "b") for number in (1, 2, 3) for rate in (1.0, INF)
    }
    assert [len(each.runs) + len(each.control_runs) for each in saved] == list(range(1, 19))
    assert {load.num_prompts for load in measure.asked} == {20}
    verdicts = {ratio.metric: ratio.verdict for ratio in document.ratios if ratio.rate == INF}
    assert verdicts["median_ttft_ms"] == "faster"


@pytest.mark.parametrize(("detail", "rounds"), [("last", {3}), ("all", {1, 2, 3}), ("none", set())])
def test_requests_are_kept_of_the_rounds_that_are_asked_for(detail: str, rounds: set[int]) -> None:
    document, _ = measure_all(FakeMeasure(), detail=detail)
    assert {run.round for run in document.runs if run.row("ttfts")} == rounds
    assert not any(run.row("ttfts") for run in document.control_runs)


def test_an_interrupted_comparison_goes_on_and_measures_torn_groups_again() -> None:
    kept, _ = measure_all(FakeMeasure(ends_after=4 + 7))
    assert len(kept.runs) + len(kept.control_runs) == 7
    measure = FakeMeasure()
    document, _ = measure_all(measure, kept, num_before=1)
    assert len(measure.asked) == 4 + 18 - 6
    assert document.runs[:4] == kept.runs[:4]
    assert (len(document.runs), len(document.control_runs)) == (12, 6)
    again = FakeMeasure()
    assert measure_all(again, document)[0] == document
    assert again.asked == []
