from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.documents import Configuration, Session, SweepDocument, SweepPoint, load_result
from baton.bench.facts import ROOT
from baton.bench.sweep.command import MAX_DOUBLINGS, SweepSettings, carry_out, goodput_rate, main, next_rate
from baton.bench.targets.line_up import Load
from baton.bench.targets.process import why_not_ready
from baton.bench.targets.spec import parse_target
from baton.wire.errors import InvalidSetting
from tests.bench.report.samples import FACTS
from tests.bench.targets.fakes import FakeLineUp, FakeMeasure, fake_session
from tests.bench.targets.mocks import LOAD, mock_target
from tests.bench.targets.processes import wait_for

SWEEP = "import sys; from baton.bench.sweep.command import main; sys.exit(main(sys.argv[1:]))"


def read(path: Path) -> dict[str, Any]:
    """{} as long as there is no file."""
    document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return document


def num_points(path: Path) -> int:
    return sum(len(configuration["points"]) for configuration in read(path).get("configurations", []))


def test_a_sweep_that_was_killed_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    target = mock_target("bad", status=400)
    goals = ["--goodput=ttft:60000", "--rates=100,200,400", "--num-prompts=6", "--warmup-runs=0"]
    arguments = [*LOAD, "--target", target, *goals, f"--json={path}"]
    with subprocess.Popen([sys.executable, "-c", SWEEP, *arguments], cwd=ROOT, stderr=subprocess.DEVNULL) as sweep:
        wait_for(lambda: num_points(path) >= 1)
        sweep.kill()
    before = read(path)
    # the server went with the sweep, or its port would be taken now
    wait_for(lambda: "refused" in why_not_ready(parse_target(target).url, 1.0))
    assert main(arguments) == 1
    after = read(path)
    assert len(after["sessions"]) == 2
    for old, new in zip(before["configurations"], after["configurations"], strict=True):
        assert new["points"][: len(old["points"])] == old["points"]
        assert [point["rate"] for point in new["points"]] == [100.0, 200.0, 400.0]
    assert after["configurations"][0]["goodput_rate"] is None
    assert "goodput (requests/s)" in capsys.readouterr().out
    load_result(path)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--goodput=ttft:1"], "--target is needed"),
        (["--target", "a=http://x:1"], "--goodput is needed"),
        (["--target", "a=http://x:1", "--goodput=ttft:1", "--attainment=90"], "--attainment: 90"),
        (["--target", "a=http://x:1", "--goodput=ttft:1", "--rates=inf"], "needs --num-prompts"),
    ],
)
def test_what_cannot_be_used_is_said_before_anything_starts(arguments: list[str], reason: str) -> None:
    with pytest.raises(InvalidSetting, match=reason):
        main(arguments)


SEARCH = SweepSettings(attainment=0.9, start_rate=1.0, precision=0.1)
MOST_POINTS = MAX_DOUBLINGS + 8


def point(rate: float, attainment: float) -> SweepPoint:
    return SweepPoint(rate, attainment, {})


def search(attainment_of: Callable[[float], float], setting: SweepSettings = SEARCH) -> list[SweepPoint]:
    points: list[SweepPoint] = []
    while (rate := next_rate(setting, points)) is not None:
        points.append(point(rate, attainment_of(rate)))
        assert len(points) <= MOST_POINTS
    return points


@pytest.mark.parametrize("capacity", [0.07, 0.7, 1.0, 5.3, 64.0, 900.0])
def test_the_highest_good_rate_is_found_to_the_precision(capacity: float) -> None:
    points = search(lambda rate: 1.0 if rate <= capacity else 0.5)
    found = goodput_rate(SEARCH, points)
    assert found is not None
    assert found <= capacity < found * 1.1 * 1.01


def test_given_rates_are_all_measured_whatever_they_show() -> None:
    setting = SweepSettings(rates=("4", "1,2"))
    points = search(lambda rate: 0.0 if rate == 2.0 else 1.0, setting)
    assert [point.rate for point in points] == [4.0, 1.0, 2.0]
    assert goodput_rate(setting, points) == 1.0


@given(st.lists(st.floats(0, 1), min_size=MOST_POINTS, max_size=MOST_POINTS))
def test_whatever_comes_back_the_search_ends_with_an_answer_that_its_points_bear_out(attained: list[float]) -> None:
    answers = iter(attained)
    points = search(lambda _: next(answers))
    found = goodput_rate(SEARCH, points)
    if found is None:
        assert min(points, key=lambda point: point.rate).attainment < 0.9
    else:
        assert all(point.attainment >= 0.9 for point in points if point.rate <= found)


CAPACITY = {"fake:a": 5.0, "fake:b": 0.6}


def attainment_of(load: Load) -> float:
    return 1.0 if load.rate <= CAPACITY[load.url] else 0.3


def sweep(measure: FakeMeasure, *flags: str, document: SweepDocument | None = None) -> tuple[SweepDocument, FakeLineUp]:
    """What is in the document at the end, or when it was interrupted."""
    session, line_up = fake_session(SweepSettings, "--num-prompts=5", *flags), FakeLineUp()
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
    turns = line_up.turns
    while_both = range(2 * min(turns.count("a"), turns.count("b")))
    assert all(abs(turns[:end].count("a") - turns[:end].count("b")) <= 1 for end in while_both)
    assert turns[:4] == ["a", "b", "b", "a"]


def test_no_request_is_sent_twice_to_a_target_and_all_get_the_same() -> None:
    measure, again = FakeMeasure(attainment_of=attainment_of), FakeMeasure(attainment_of=attainment_of)
    sweep(measure)
    for url in CAPACITY:
        assert set(Counter(load.seed for load in measure.asked if load.url == url).values()) == {1}
    first = [next(load.seed for load in measure.asked if load.url == url) for url in CAPACITY]
    assert first[0] == first[1]
    fresh = SweepDocument(facts=FACTS, slo={}, attainment=0.9, configurations=[Configuration("a", points=[])])
    fresh.sessions.append(Session("before", "", 0.0))
    sweep(again, document=fresh)
    assert not {load.seed for load in measure.asked} & {load.seed for load in again.asked}
