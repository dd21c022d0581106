"""A group's process may crash, hang or lie: each costs one row, and nothing waits longer than the limit."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import pytest

from bench.gpu_check.plan import Check, Group
from bench.gpu_check.rows import Row, Verdict, exit_status
from bench.gpu_check.run import GroupResult, GroupRun

FAKE = "tests.bench.gpu_check.fake_worker"


def run(
    *names: str, limit_s: float = 30.0, device: str = "cuda", group: str = "fake", num_cases: int = 1
) -> GroupResult:
    checks = tuple(Check(name, num_cases) for name in names)
    return GroupRun(Group(group, "", limit_s, limit_s, checks), device, quick=False, module=FAKE).run(lambda _: None)


def verdicts(result: GroupResult) -> list[Verdict]:
    return [row.verdict for row in result.rows]


def only(result: GroupResult) -> Row:
    (row,) = result.rows
    return row


def test_rows_arrive_as_they_were_made() -> None:
    result = run("good", "wrong")
    assert verdicts(result) == [Verdict.OK, Verdict.MEASURED, Verdict.WRONG, Verdict.MEASURED]
    assert exit_status(result.rows, strict=False) == 1


def test_where_no_gpu_is_speeds_are_marked() -> None:
    assert verdicts(run("good", device="cpu")) == [Verdict.OK, Verdict.MEANINGLESS]


@pytest.mark.parametrize("name", ["crash", "raise", "garbage"])
def test_a_check_that_dies_is_one_failed_row_and_the_next_has_a_new_process(name: str) -> None:
    result = run("pid", name, "pid", "good")
    first, failed, second, good = result.rows[:4]
    assert failed.verdict == Verdict.FAILED
    assert failed.case == name
    assert first.name != second.name, "the same process went on"
    assert good.verdict == Verdict.OK
    assert exit_status(result.rows, strict=False) == 1


def test_what_an_error_said_stands_in_the_row() -> None:
    assert "illegal memory access" in only(run("raise")).note


@pytest.mark.parametrize("name", ["hang", "hang with a child"])
def test_a_check_that_hangs_ends_with_the_group(name: str) -> None:
    mark = secrets.token_hex(8)
    begin_s = time.monotonic()
    result = run("good", name, "good", limit_s=6.0, group=mark)
    taken_s = time.monotonic() - begin_s
    assert taken_s < 6.0 + 20.0, "the limit, and time to kill the process on a busy machine"
    assert verdicts(result) == [Verdict.OK, Verdict.MEASURED, Verdict.FAILED, Verdict.FAILED]
    assert "did not answer" in result.rows[2].note
    assert "not reached within the 6 s" in result.rows[3].note
    assert exit_status(result.rows, strict=False) == 1
    assert not _processes_of(mark), "a process of the check was left behind"


def test_what_a_machine_lacks_is_no_failure() -> None:
    row = only(run("missing"))
    assert (row.verdict, row.note) == (Verdict.NOT_RUN, "nccl needs two GPUs")


def test_a_process_that_cannot_begin_fails_every_check() -> None:
    result = run("one", "two", group="cannot begin")
    assert verdicts(result) == [Verdict.FAILED, Verdict.FAILED]
    assert "there is no such device" in result.rows[0].note


def test_a_check_without_rows_has_failed() -> None:
    row = only(run("nothing"))
    assert (row.verdict, row.note) == (Verdict.FAILED, "no row came of it")


def test_cases_that_were_not_run_are_noticed() -> None:
    short = run("few", num_cases=3)
    assert verdicts(short) == [Verdict.OK, Verdict.MEASURED, Verdict.FAILED]
    assert "only 2 of 3 cases" in short.rows[-1].note
    assert exit_status(short.rows, strict=False) == 1
    assert verdicts(run("many", num_cases=3)) == [Verdict.OK, Verdict.MEASURED]


def _processes_of(mark: str) -> list[str]:
    """Processes with this word on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if mark.encode() in words and state not in "ZX":
            found.append(entry.name)
    return found
