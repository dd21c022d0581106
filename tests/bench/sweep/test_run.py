from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from bench.sweep.report import report
from bench.sweep.run import Plan, carry_out, concluded
from bench.sweep.search import Search
from bench.targets.load import Load
from tests.bench.targets.fakes import FakeLineUp, FakeMeasure

CAPACITY = {"fake:a": 5.0, "fake:b": 0.6}


def attainment_of(load: Load) -> float:
    return 1.0 if load.rate <= CAPACITY[load.url] else 0.3


def plan(*, repeat: int = 1, session: int = 0, warmup_runs: int = 1, is_one_at_a_time: bool = False) -> Plan:
    search = Search(attainment=0.9, start_rate=1.0, precision=0.1)
    return Plan(search, repeat, warmup_runs, lambda rate: 10 + round(rate), 3, session, is_one_at_a_time)


def new_document() -> dict[str, Any]:
    return {
        "slo": {"ttft": 200.0},
        "attainment": 0.9,
        "configurations": [{"name": name, "command": f"run {name}", "points": []} for name in ("a", "b")],
    }


def sweep(
    measure: FakeMeasure, how: Plan, document: dict[str, Any] | None = None, saved: list[Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    line_up = FakeLineUp(("a", "b"))
    kept: list[Any] = [] if saved is None else saved
    found = carry_out(document or new_document(), how, line_up, measure, kept.append, lambda _: None)
    return found, line_up.turns


def test_every_configuration_is_searched_with_its_targets_taking_turns() -> None:
    document, turns = sweep(FakeMeasure(attainment_of=attainment_of), plan(warmup_runs=0))
    a, b = document["configurations"]
    assert 5.0 / 1.12 < a["goodput_rate"] <= 5.0
    assert 0.6 / 1.12 < b["goodput_rate"] <= 0.6
    assert a["pinning"] == ["it on 0"]
    while_both = range(2 * min(turns.count("a"), turns.count("b")))
    assert all(abs(turns[:end].count("a") - turns[:end].count("b")) <= 1 for end in while_both)
    assert turns[:4] == ["a", "b", "b", "a"]


def test_one_at_a_time_a_configuration_is_searched_to_its_end() -> None:
    _, turns = sweep(FakeMeasure(attainment_of=attainment_of), plan(is_one_at_a_time=True))
    assert turns == sorted(turns)


def test_the_middle_run_stands_for_a_point() -> None:
    attained = iter([0.95, 0.5, 0.91] * 50)
    document, _ = sweep(FakeMeasure(attainment_of=lambda _: next(attained)), plan(repeat=3, warmup_runs=0))
    point = document["configurations"][0]["points"][0]
    assert point["attainment"] == 0.91
    assert point["attainments"] == [0.95, 0.5, 0.91]
    assert point["result"]["slo_attainment"] == 0.91


def test_no_request_is_sent_twice_to_a_target_and_all_get_the_same() -> None:
    measure = FakeMeasure(attainment_of=attainment_of)
    document, _ = sweep(measure, plan(repeat=2))
    for url in CAPACITY:
        seeds = Counter(load.seed for load in measure.asked if load.url == url)
        assert set(seeds.values()) == {1}
    first = {url: next(load for load in measure.asked if load.url == url) for url in CAPACITY}
    assert first["fake:a"].seed == first["fake:b"].seed
    again = FakeMeasure(attainment_of=attainment_of)
    sweep(again, plan(repeat=2, session=1))
    assert not {load.seed for load in measure.asked} & {load.seed for load in again.asked}
    assert document["configurations"][0]["points"]


def test_an_interrupted_sweep_goes_on_from_its_points() -> None:
    whole, _ = sweep(FakeMeasure(attainment_of=attainment_of), plan())
    saved: list[dict[str, Any]] = []
    with pytest.raises(KeyboardInterrupt):
        sweep(FakeMeasure(attainment_of=attainment_of, ends_after=7), plan(), saved=saved)
    assert sum(len(found["points"]) for found in saved[-1]["configurations"]) == 5
    measure = FakeMeasure(attainment_of=attainment_of)
    document, _ = sweep(measure, plan(session=1), saved[-1])
    rates = [[point["rate"] for point in found["points"]] for found in document["configurations"]]
    assert rates == [[point["rate"] for point in found["points"]] for found in whole["configurations"]]
    assert len(measure.asked) == sum(map(len, rates)) - 5 + 2


def test_a_finished_sweep_measures_nothing() -> None:
    document, _ = sweep(FakeMeasure(attainment_of=attainment_of), plan())
    measure = FakeMeasure(attainment_of=attainment_of)
    assert sweep(measure, plan(session=1), document)[0] == document
    assert measure.asked == []
    assert concluded(document, plan().search, []) == document


def test_a_run_without_an_attainment_is_one_that_failed() -> None:
    document, _ = sweep(FakeMeasure(attainment_of=lambda _: None), plan(warmup_runs=0))
    assert document["configurations"][0]["goodput_rate"] is None


def test_the_report_has_the_goodput_and_every_point() -> None:
    document, _ = sweep(FakeMeasure(attainment_of=attainment_of), plan())
    shown = report(document)
    assert "**Highest rate at which 90% of the requests meet ttft 200 ms**" in shown
    a = document["configurations"][0]
    assert f"| a             | {a['goodput_rate']:>18g} |" in shown
    assert shown.count("30.0%") + shown.count("100.0%") == sum(len(c["points"]) for c in document["configurations"])
