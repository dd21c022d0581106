"""How long a stream may stand still, by what happened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from tests.campaign.answers import Choice
from tests.campaign.corpus import Entry
from tests.campaign.deployment import Deployment, Outage
from tests.campaign.faults import Happened
from tests.campaign.gaps import LOST_S, NORMAL_S, Gap, GapJudge, Known, gaps_of
from tests.campaign.load import Asked
from tests.campaign.pace import Pace
from tests.campaign.requests import COMPLETIONS, TEXT, Request
from tests.campaign.schedule import Fault
from tests.stations.ring import STAMP, Station, request_key

TOKEN_S = 0.001
ENTRY = Entry(0, Request(COMPLETIONS, TEXT, {}), (Choice([1] * 10),), (90, 10))
OPEN_S = 0.1
"""To compute what one such request needs."""
KILL = Fault(0, 0.0, "kill", "decode-0", 1.0, "", 0.0, 0.0)
ASKED = Asked(0, ENTRY, "stream", 0.0, ended_s=200.0)
GAP = Gap(ASKED, 100.0, 110.0)


def bound_s(
    *happened: Happened, outages: tuple[Outage, ...] = (), scarce: tuple[Outage, ...] = (), pace: Pace | None = None
) -> float:
    known = Known(happened, outages, scarce, [ASKED, replace(ASKED, ended_s=50.0)], pace or Pace(), TOKEN_S)
    return known.bound_of(GAP).seconds


def hit(kind: str, begun_s: float, ended_s: float | None = None) -> Happened:
    return Happened(replace(KILL, kind=kind), begun_s, begun_s if ended_s is None else ended_s)


def test_gaps_are_the_waits_of_each_choice_from_the_asking_on() -> None:
    asked = replace(ASKED, begun_s=1.0, moments_s=[[2.0, 4.0], [3.0]], totals=[[1, 2], [1]])
    assert [(gap.begun_s, gap.ended_s) for gap in gaps_of(asked)] == [(1.0, 2.0), (2.0, 4.0), (1.0, 3.0)]


def test_a_stream_may_stand_still_for_as_long_as_it_does_undisturbed() -> None:
    silent = replace(ASKED, entry=replace(ENTRY, silent_s=0.9))
    known = Known((), (), (), [silent], Pace(), TOKEN_S)
    assert known.bound_of(Gap(silent, 100.0, 110.0)).seconds == pytest.approx(NORMAL_S + 0.9 + OPEN_S)


@pytest.mark.parametrize(
    ("happened", "more_s"),
    [
        ([], 0.0),
        ([hit("kill", 97.0)], 0.0),
        ([hit("kill", 111.0)], 0.0),
        ([hit("kill", 100.5)], LOST_S + OPEN_S),
        ([hit("kill", 99.0)], LOST_S + OPEN_S - 1.0),
        ([hit("drain", 101.0, 104.0)], 0.1),
        ([hit("freeze", 101.0, 101.5)], 0.5 + LOST_S + OPEN_S),
        ([hit("freeze", 101.0, 109.0)], 3.5 + LOST_S + OPEN_S),
        ([hit("hole", 95.0, 104.0)], 4.0 + LOST_S + OPEN_S),
        ([hit("router-freeze", 101.0, 103.0)], 2.0 + 5.0 + OPEN_S),
        ([hit("kill", 101.0), hit("freeze", 102.0, 102.5)], 1.5 + LOST_S + OPEN_S),
        ([hit("kill", 101.0), hit("freeze", 106.0, 106.5)], 0.5 + 2 * (LOST_S + OPEN_S)),
        ([hit("kill", 97.0), hit("kill", 100.5)], 7.0 + LOST_S + OPEN_S),
    ],
    ids=[
        "nothing",
        "before",
        "behind",
        "kill",
        "just-before",
        "drain",
        "short",
        "long",
        "link",
        "router",
        "together",
        "one-by-one",
        "several-kills",
    ],
)
def test_each_fault_that_touches_a_gap_allows_what_it_may_cost(happened: list[Happened], more_s: float) -> None:
    assert bound_s(*happened) == pytest.approx(NORMAL_S + OPEN_S + more_s)


def test_the_time_without_a_decode_node_is_no_fault_of_the_relay() -> None:
    assert bound_s(outages=(Outage(90.0, 103.0),)) == pytest.approx(NORMAL_S + OPEN_S + 3.0 + LOST_S + OPEN_S)


def test_nobody_goes_on_for_a_node_that_stands_still_while_it_is_the_only_one() -> None:
    frozen, killed = hit("freeze", 101.0, 107.0), hit("kill", 101.0)
    alone = (Outage(106.0, 130.0),)
    assert bound_s(frozen, scarce=alone) - bound_s(frozen) == pytest.approx(6.0 - 3.5)
    assert bound_s(killed, scarce=alone) == bound_s(killed)
    assert bound_s(frozen, scarce=(Outage(90.0, 99.0),)) == bound_s(frozen)


def test_work_may_take_longer_where_the_machine_was_slow_and_waits_may_not() -> None:
    pace = Pace()
    for moment_s in range(98, 112):
        pace.add(float(moment_s), 0.5)
    pace.add_lag(105.0, 0.25)
    pace.add_lag(120.0, 9.0)
    works_s = NORMAL_S + OPEN_S + LOST_S + OPEN_S
    assert bound_s(hit("freeze", 101.0, 109.0), pace=pace) == pytest.approx(3.5 + 0.25 + 2 * works_s)


class NoOutages:
    """What the judge asks of a deployment."""

    outages: tuple[Outage, ...] = ()
    scarcities: tuple[Outage, ...] = ()


@pytest.mark.parametrize("totals", [[1, 2], [0, 0]], ids=["ids", "no_ids"])
@pytest.mark.parametrize(("waited_s", "is_found"), [(0.6, False), (0.0, True)], ids=["machine", "product"])
def test_a_gap_for_which_threads_waited_for_a_processor_is_the_machines(
    tmp_path: Path, waited_s: float, is_found: bool, totals: list[int]
) -> None:
    """The token was made in time, and the router had it 1 s later."""
    asked = replace(ASKED, request_id="cmpl-1", begun_s=9.0, moments_s=[[9.3, 10.4]], totals=[totals], ended_s=10.5)
    judge = GapJudge([], cast(Deployment, NoOutages()), 0.0, tmp_path)
    received = list(Station)[1:4]
    stamps = {
        "decode-0": [(9.2, Station.EMITTED, 0, 0.0), (9.3, Station.EMITTED, 1, 0.0)],
        "router": [(9.3, each, 0, 0.0) for each in received] + [(10.4, each, 1, waited_s) for each in received],
    }
    for program, rows in stamps.items():
        with (tmp_path / f"{program}.stamps").open("wb") as file:
            for moment_s, station, index, own_s in rows:
                stamp = (moment_s, 0.0, own_s, 0.0, request_key("cmpl-1"), 5, index, 0, station)
                file.write(STAMP.pack(*stamp))
    assert bool(judge.findings_of(asked, [asked])) == is_found
    (line,) = judge.lines
    assert "no fault touched a gap of 1.10 s; 1.00 s from the node to the router" in line
