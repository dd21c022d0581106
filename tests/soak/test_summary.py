"""The parts of a soak are added up, and judged by what grows within them and from one to the next."""

from __future__ import annotations

from dataclasses import replace

from tests.soak.kept import LongGap, Part
from tests.soak.summary import grown, hours, summary

MINUTES = 20


def part(number: int = 1, hourly_mib: float = 0.0, **left: int) -> Part:
    """A part of 20 minutes; the router's memory begins anew, fills up in the first third, and then grows."""
    filling = [min(minute, MINUTES // 3) * 10 + minute * hourly_mib / 60 for minute in range(MINUTES)]
    rows = [[60.0 * minute, 40.0, 9.0, (100 + number + mib) * 2**20] for minute, mib in enumerate(filling)]
    return Part(
        number,
        number,
        "abc",
        "",
        running_s=60.0 * MINUTES,
        has_ended=True,
        num_tokens=100,
        faults={"cut": 2},
        requests={"well": 10, "error": 1},
        excused={"router killed": 1},
        samples={"router": rows},
        left=left,
    )


def test_hours_faults_requests_and_errors_are_added_up() -> None:
    killed = replace(part(2), has_ended=False, running_s=600.0, code="def")
    text = "\n".join(summary([part(), killed]))
    assert "0.50 of 24 hours, in 2 parts, the longest of 20 minutes, 1 of them cut short" in text
    assert "versions of the code (parts): abc (1), def (1)" in text
    assert "4 faults: 4 cut" in text
    assert "22 requests, 200 streamed tokens: 20 well, 2 error" in text
    assert "2 errors, 2 of them excused (2 router killed); 0 findings" in text


def test_the_longest_gaps_come_first_and_those_without_a_fault_with_their_station() -> None:
    some = replace(part(), gaps=[LongGap(1.0, 2.0, ["cut"]), LongGap(3.0, 4.0, [])], lone_gaps=["in writing"])
    text = "\n".join(summary([some]))
    assert "longest gaps: 3.00 of 4.00 s (no fault); 1.00 of 2.00 s (cut)" in text
    assert "part 1: in writing" in text


def test_growth_within_parts_is_found_and_the_filling_of_tables_is_not() -> None:
    assert grown([part(number) for number in range(1, 5)]) == []
    (line,) = grown([part(number, hourly_mib=20.0) for number in range(1, 5)])
    assert line == "router grows by +20.00 (+20.00 to +20.00) MiB an hour over 4 parts"


def test_half_an_hour_is_needed_to_judge() -> None:
    assert hours([part()]) < 0.5
    assert grown([part(hourly_mib=20.0)]) == []


def test_what_each_part_leaves_more_of_is_found() -> None:
    def of(*counts: int) -> list[str]:
        return grown([part(number, journals=count) for number, count in enumerate(counts)])

    assert of(9, 2, 3, 4, 7) == ["journals are left by each part, and more each time: [2, 3, 4, 7]"]
    assert of(2, 3, 3, 4) == of(4, 3, 2, 1) == of(2, 3, 4) == []


def test_a_part_that_was_killed_at_once_changes_nothing() -> None:
    killed = Part(2, 2, "abc", "")
    assert summary([part(), killed])[1:] == summary([part()])[1:]
