"""A group's processes may crash, hang or lie: each costs one row, and nothing waits longer than the limit."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import psutil
import pytest

from baton.bench.gpu_check.command import Group, GroupResult, GroupRun
from baton.bench.gpu_check.rows import Row, Verdict, exit_status
from tests.bench.targets.processes import wait_for

FAKE = "tests.bench.gpu_check.fake_worker"
TESTS = """
import os
import pytest

@pytest.mark.parametrize("size", [1, 2])
def test_it_is_right(size, record_property):
    record_property("value", 0.5)
    record_property("bound", 1.0)
    record_property("unit", "of max")
    assert size < 2

def test_it_crashes():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_it_cannot_be():
    pytest.skip("one GPU")
"""


def run(*names: str, limit_s: float = 60.0, device: str = "cuda", group: str = "fake") -> GroupResult:
    return GroupRun(Group(group, "", limit_s, measures=names), device, quick=False, measure=FAKE).run(lambda _: None)


def run_tests(folder: Path, text: str) -> dict[str, Row]:
    (folder / "test_it.py").write_text(text)
    group = Group("checks", "", 100.0, tests="test_it.py")
    return {f"{row.name} {row.case}": row for row in GroupRun(group, "cuda", quick=True, tests=folder).run(print).rows}


def verdicts(result: GroupResult) -> list[Verdict]:
    return [row.verdict for row in result.rows]


@pytest.mark.parametrize(("name", "note"), [("crash", "exited with status 3"), ("garbage", "cannot be read")])
def test_what_dies_costs_a_row_and_the_rows_before_it_stay(name: str, note: str) -> None:
    result = run(name, "good")
    assert verdicts(result) == [Verdict.MEASURED, Verdict.FAILED, Verdict.MEASURED]
    assert note in result.rows[1].note
    assert exit_status(result.rows, strict=False) == 1


def test_what_hangs_ends_with_the_group_and_leaves_nothing() -> None:
    mark = secrets.token_hex(8)
    begin_s = time.monotonic()
    result = run("hang", "good", limit_s=1.5, group=mark)
    assert time.monotonic() - begin_s < 21.5, "the limit, and time to kill the process on a busy machine"
    assert verdicts(result)[-2:] == [Verdict.FAILED, Verdict.FAILED]
    assert "said nothing within" in result.rows[-2].note
    assert "not reached within the 1.5 s" in result.rows[-1].note
    # one that was killed is here until the kernel has taken its memory back
    wait_for(lambda: not [each for each in psutil.process_iter(["cmdline"]) if mark in (each.info["cmdline"] or ())])


def test_what_a_machine_lacks_is_no_failure_and_no_row_at_all_is_one() -> None:
    result = run("missing", "nothing")
    assert verdicts(result) == [Verdict.MEASURED, Verdict.NOT_RUN, Verdict.FAILED]
    assert result.rows[-1].note == "no row came of it"


def test_each_test_is_a_row_and_only_what_an_assertion_says_is_wrong(tmp_path: Path) -> None:
    rows = run_tests(tmp_path, TESTS)
    assert {name: row.verdict for name, row in rows.items()} == {
        "it is right 1": Verdict.OK,
        "it is right 2": Verdict.WRONG,
        "it crashes ": Verdict.FAILED,
        "it cannot be ": Verdict.NOT_RUN,
    }
    assert (rows["it is right 1"].value, rows["it is right 1"].bound, rows["it is right 1"].unit) == (
        0.5,
        1.0,
        "of max",
    )
    assert "illegal memory access" in rows["it crashes "].note
    assert rows["it cannot be "].note == "one GPU"
