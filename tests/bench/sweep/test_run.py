from __future__ import annotations

import copy
from collections import Counter

from baton.bench.documents import Configuration, Session, SweepDocument
from baton.bench.sweep.command import SweepSettings, carry_out
from baton.bench.targets.line_up import Load
from tests.bench.report.samples import FACTS
from tests.bench.targets.fakes import FakeLineUp, FakeMeasure, fake_session

CAPACITY = {"fake:a": 5.0, "fake:b": 0.6}


def attainment_of(load: Load) -> float:
    return 1.0 if load.rate <= CAPACITY[load.url] else 0.3


def sweep(measure: FakeMeasure, *flags: str, document: SweepDocument | None = None) -> tuple[SweepDocument, FakeLineUp]:
    """What is in the document at the end, or when it was interrupted."""
    session, line_up = fake_session(SweepSettings, "--num-prompts=5", *flags), FakeLineUp(("a", "b"))
    configurations = [Configuration(name, points=[]) for name in ("a", "b")]
    found = copy.deepcopy(document) or SweepDocument(
        facts=FACTS, slo={"ttft": 200.0}, attainment=0.9, configurations=configurations
    )
    found.sessions.append(Session("now", "", 0.0))
    try:
        carry_out(found, session, line_up.as_line_up(), measure)
    except KeyboardInterrupt:
        found = session.saved[-1]
    return found, line_up


def test_every_configuration_is_searched_with_its_targets_taking_turns() -> None:
    document, line_up = sweep(FakeMeasure(attainment_of=attainment_of), "--warmup-runs=0")
    a, b = document.configurations
    assert a.goodput_rate is not None
    assert b.goodput_rate is not None
    assert 5.0 / 1.12 < a.goodput_rate <= 5.0
    assert 0.6 / 1.12 < b.goodput_rate <= 0.6
    assert a.pinning == ["it on 0"]
    turns = line_up.turns
    while_both = range(2 * min(turns.count("a"), turns.count("b")))
    assert all(abs(turns[:end].count("a") - turns[:end].count("b")) <= 1 for end in while_both)
    assert turns[:4] == ["a", "b", "b", "a"]


def test_the_middle_run_stands_for_a_point() -> None:
    attained = iter([0.95, 0.5, 0.91] * 50)
    document, _ = sweep(FakeMeasure(attainment_of=lambda _: next(attained)), "--repeat=3", "--warmup-runs=0")
    point = document.configurations[0].points[0]
    assert (point.attainment, point.attainments) == (0.91, [0.95, 0.5, 0.91])
    assert point.result["slo_attainment"] == 0.91


def test_no_request_is_sent_twice_to_a_target_and_all_get_the_same() -> None:
    measure, again = FakeMeasure(attainment_of=attainment_of), FakeMeasure(attainment_of=attainment_of)
    sweep(measure, "--repeat=2")
    for url in CAPACITY:
        assert set(Counter(load.seed for load in measure.asked if load.url == url).values()) == {1}
    first = [next(load.seed for load in measure.asked if load.url == url) for url in CAPACITY]
    assert first[0] == first[1]
    fresh = SweepDocument(facts=FACTS, slo={}, attainment=0.9, configurations=[Configuration("a", points=[])])
    fresh.sessions.append(Session("before", "", 0.0))
    sweep(again, "--repeat=2", document=fresh)
    assert not {load.seed for load in measure.asked} & {load.seed for load in again.asked}


def test_an_interrupted_sweep_goes_on_from_its_points() -> None:
    whole, _ = sweep(FakeMeasure(attainment_of=attainment_of))
    torn, _ = sweep(FakeMeasure(attainment_of=attainment_of, ends_after=7))
    assert sum(len(each.points) for each in torn.configurations) == 5
    measure = FakeMeasure(attainment_of=attainment_of)
    document, _ = sweep(measure, document=torn)
    rates = [[point.rate for point in each.points] for each in document.configurations]
    assert rates == [[point.rate for point in each.points] for each in whole.configurations]
    assert len(measure.asked) == sum(map(len, rates)) - 5 + 2
    nothing = FakeMeasure()
    assert sweep(nothing, document=document)[0].configurations == document.configurations
    assert nothing.asked == []
