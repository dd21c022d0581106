from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bench.compare.plan import Schedule, steps_of
from bench.compare.run import Keeper, carry_out, concluded, keep_whole_groups
from bench.targets.load import Load
from tests.bench.targets.fakes import FakeLineUp, FakeMeasure

SCHEDULE = Schedule(("a", "b"), (1.0, float("inf")), 3, 1, True, False, 0)
NUM_PROMPTS = {1.0: 20, float("inf"): 40}


class Files:
    """What was saved, newest last."""

    def __init__(self) -> None:
        self.saved: list[dict[str, Any]] = []

    def keeper(self, detail: str = "last") -> Keeper:
        return Keeper(detail, lambda document: self.saved.append(dict(document)), lambda _: None)


def measure_all(
    measure: FakeMeasure,
    files: Files,
    document: dict[str, Any] | None = None,
    *,
    detail: str = "last",
    session: int = 0,
) -> dict[str, Any]:
    schedule = dataclasses.replace(SCHEDULE, session=session)
    whole, done = keep_whole_groups(document or {}, schedule)
    line_up = FakeLineUp(("a", "b"))
    steps = steps_of(schedule, done)
    return carry_out(whole, steps, NUM_PROMPTS, schedule.rounds, line_up, measure, files.keeper(detail))


def test_every_load_goes_to_its_target_and_its_result_into_the_file() -> None:
    measure, files = FakeMeasure(lambda load: 50.0 if load.url == "fake:b" else 100.0), Files()
    document = measure_all(measure, files)
    assert {(run["target"], run["round"], run["rate"]) for run in document["runs"]} == {
        (target, number, rate) for target in ("a", "b") for number in (1, 2, 3) for rate in (1.0, "inf")
    }
    assert len(document["control_runs"]) == 6
    assert {load.num_prompts for load in measure.asked if load.rate == 1.0} == {20}
    assert {load.num_prompts for load in measure.asked if load.rate != 1.0} == {40}
    verdicts = {ratio["metric"]: ratio["verdict"] for ratio in document["ratios"] if ratio["rate"] == "inf"}
    assert verdicts["median_ttft_ms"] == "2.00x (2.00 - 2.00) faster"
    assert document["targets"][0]["pinning"] == ["it on 0"]
    assert document["workload"] == {"name": "random"}


def test_the_file_is_saved_after_every_load_that_counts() -> None:
    files = Files()
    measure_all(FakeMeasure(), files)
    sizes = [len(document["runs"]) + len(document["control_runs"]) for document in files.saved]
    assert sizes == list(range(1, 19))


@pytest.mark.parametrize(("detail", "rounds"), [("last", {3}), ("all", {1, 2, 3}), ("none", set())])
def test_requests_are_kept_of_the_rounds_that_are_asked_for(detail: str, rounds: set[int]) -> None:
    document = measure_all(FakeMeasure(), Files(), detail=detail)
    assert {run["round"] for run in document["runs"] if "ttfts" in run["result"]} == rounds
    assert all("ttfts" not in run["result"] for run in document["control_runs"])


def test_what_targets_and_others_cost_is_kept() -> None:
    document = measure_all(FakeMeasure(), Files())
    costs = {run["target"]: (run["cpu_s"], run["others_cpu_s"]) for run in document["runs"]}
    assert costs == {"a": (1.0, 2.0), "b": (2.0, 1.0)}


def test_an_interrupted_comparison_goes_on_and_measures_torn_groups_again() -> None:
    files = Files()
    with pytest.raises(KeyboardInterrupt):
        measure_all(FakeMeasure(ends_after=4 + 7), files)
    kept = files.saved[-1]
    assert len(kept["runs"]) + len(kept["control_runs"]) == 7
    measure = FakeMeasure()
    document = measure_all(measure, files, kept, session=1)
    assert len(measure.asked) == 4 + 18 - 6
    assert document["runs"][:4] == kept["runs"][:4]
    assert sorted((run["target"], run["round"], str(run["rate"])) for run in document["runs"]) == sorted(
        (target, number, rate) for target in ("a", "b") for number in (1, 2, 3) for rate in ("1.0", "inf")
    )


def test_a_comparison_that_is_complete_measures_nothing() -> None:
    measure, files = FakeMeasure(), Files()
    document = measure_all(FakeMeasure(), files)
    assert measure_all(measure, files, document) == document
    assert measure.asked == []


def test_two_equal_targets_on_a_noisy_machine_get_no_verdict() -> None:
    values = iter([100, 120, 90, 115, 130, 95, 105, 88] * 10)

    def noisy(_: Load) -> float:
        return float(next(values))

    document = concluded(measure_all(FakeMeasure(noisy), Files()))
    assert {ratio["is_clear"] for ratio in document["ratios"] if ratio["metric"] == "median_ttft_ms"} == {False}
