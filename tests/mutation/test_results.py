"""The summary of mutants, and the file that a run goes on with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutation.results import Row, append, equivalents, interval, read, summary
from tests.mutation.trial import ROOT

ROW = Row("area", "a.py", 3, "arithmetic", "a + b", "(a - b)", "survived")


def test_the_last_word_about_a_mutant_counts(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    for row in (ROW, replace(ROW, after="(b)"), replace(ROW, line=4, outcome="killed", test="t")):
        append(file, row)
    assert [(row.line, row.outcome) for row in read(file)] == [(4, "killed"), (3, "survived")]


def test_a_mutant_that_no_test_can_see_counts_neither_way() -> None:
    rows = [ROW, replace(ROW, after="(b)"), replace(ROW, outcome="killed"), replace(ROW, outcome="timeout")]
    found = summary(rows, {ROW.name: "because"})
    assert (found.num_killed, found.num_timeouts, found.num_equivalent, found.survivors) == (1, 1, 1, [rows[1]])
    assert str(found).startswith("2 of 3 killed (1 by time), 66.7% [")


@pytest.mark.parametrize(("num_found", "num_all", "low", "high"), [(0, 0, 0.0, 1.0), (95, 100, 0.888, 0.978)])
def test_a_share_has_its_confidence_interval(num_found: int, num_all: int, low: float, high: float) -> None:
    assert interval(num_found, num_all) == pytest.approx((low, high), abs=0.001)


def test_accepted_mutants_are_of_lines_that_are_there() -> None:
    for (file, before, _after), why in equivalents().items():
        lines = " ".join((ROOT / file).read_text().split())
        assert " ".join(before.split()) in lines, (file, before)
        assert why
