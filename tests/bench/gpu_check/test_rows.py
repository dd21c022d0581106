from __future__ import annotations

import json
import math

import pytest

from baton.bench.gpu_check.rows import (
    CORRECTNESS,
    Row,
    Verdict,
    exit_status,
    failed_row,
    missing_row,
    render,
    speed_row,
)

OK = Row("error", "case", Verdict.OK, 1.0, "of max", 2.0)
WRONG = Row("error", "case", Verdict.WRONG, 3.0, "of max", 2.0)
SLOW = speed_row("step", "case", 9.0, "ms", bound=3.0, target=4.0)


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (speed_row("t", "c", 4.0, "ms", bound=3.0, target=4.0), Verdict.OK),
        (speed_row("t", "c", 4.01, "ms", bound=3.0, target=4.0), Verdict.BELOW),
        (speed_row("t", "c", 400.0, "ms", bound=3.0), Verdict.MEASURED),
        (speed_row("t", "c", 2.0, "ms", bound=3.0, target=4.0), Verdict.DOUBTED),
        (speed_row("t", "c", math.nan, "ms", bound=3.0, target=4.0), Verdict.DOUBTED),
        (speed_row("r", "c", 60.0, "TFLOP/s", bound=100.0), Verdict.MEASURED),
        (speed_row("r", "c", 107.0, "GB/s", bound=100.0), Verdict.DOUBTED),
        (speed_row("l", "c", 299.0, "us", target=300.0), Verdict.OK),
        (speed_row("l", "c", 301.0, "us", target=300.0), Verdict.BELOW),
        (speed_row("l", "c", 1.0, "times", target=1.0), Verdict.OK),
        (speed_row("l", "c", 0.9, "times", target=1.0), Verdict.BELOW),
        (speed_row("f", "c", 1.0, "ms"), Verdict.MEASURED),
        (missing_row("m", "c", "no nixl"), Verdict.NOT_RUN),
        (failed_row("f", "c", "crashed"), Verdict.FAILED),
    ],
)
def test_verdicts(row: Row, verdict: Verdict) -> None:
    assert row.verdict == verdict


def test_a_target_is_a_share_of_the_machines_limit() -> None:
    assert SLOW.target == 4.0
    assert SLOW.share == pytest.approx(1 / 3)
    assert speed_row("rate", "case", 30.0, "GB/s", bound=40.0).share == 0.75
    assert OK.share is None


@pytest.mark.parametrize(
    ("rows", "status", "strict_status"),
    [
        ([OK], 0, 0),
        ([OK, WRONG], 1, 1),
        ([OK, failed_row("f", "c", "it hung")], 1, 1),
        ([OK, SLOW], 0, 1),
        ([OK, speed_row("t", "c", 1.0, "ms", bound=3.0)], 0, 1),
        ([OK, missing_row("m", "c", "one GPU"), speed_row("f", "c", 1.0, "ms")], 0, 0),
        ([], 1, 1),
    ],
)
def test_only_wrong_and_unfinished_rows_end_with_1_unless_it_is_strict(
    rows: list[Row], status: int, strict_status: int
) -> None:
    assert exit_status(rows, strict=False) == status
    assert exit_status(rows, strict=True) == strict_status


def test_where_no_gpu_is_speeds_mean_nothing_and_errors_do() -> None:
    assert SLOW.where_no_gpu_is().verdict == Verdict.MEANINGLESS
    assert speed_row("f", "c", 1.0, "ms").where_no_gpu_is().verdict == Verdict.MEANINGLESS
    for row in (OK, WRONG, failed_row("f", "c", "x"), missing_row("m", "c", "x")):
        assert row.where_no_gpu_is() == row
    assert exit_status([SLOW.where_no_gpu_is()], strict=True) == 0


@pytest.mark.parametrize("row", [OK, SLOW, speed_row("e", "c", math.nan, "ms"), missing_row("m", "c", "x")])
def test_rows_travel_as_json(row: Row) -> None:
    assert Row.from_json(json.loads(json.dumps(row.as_json(), allow_nan=False))) == row


TABLE = (
    Row("attention", "bfloat16", Verdict.WRONG, 0.25, "of max", 0.02, note="n" * 300),
    speed_row("decode step", "8B, batch 1", 4.0, "ms", bound=3.0, target=4.0),
    missing_row("transfer", "nccl", "one GPU"),
    failed_row("graphs", "tokens", "did not answer within 30 s"),
)


def test_the_table_says_value_limit_share_target_and_verdict() -> None:
    lines = render([("speed: how fast", TABLE)]).splitlines()
    assert "speed: how fast" in lines
    step = next(line for line in lines if line.startswith("| decode step"))
    assert [cell.strip() for cell in step.split("|")[1:9]] == [
        "decode step",
        "8B, batch 1",
        "4 ms",
        "3",
        "75%",
        "4",
        "ok",
        "",
    ]
    wrong = next(line for line in lines if line.startswith("| attention"))
    assert "0.25 of max" in wrong
    assert "WRONG" in wrong
    assert len(wrong) < 260
    assert next(line for line in lines if "one GPU" in line).startswith("| transfer")
    assert lines[-1] == "1 WRONG, 1 FAILED, 1 ok, 1 not run"


def test_correctness_that_was_not_checked_is_said_at_the_end() -> None:
    unchecked = missing_row(CORRECTNESS, "graphs", "this is no checkout")
    shown = render([("speed", TABLE), ("graphs", [unchecked])])
    assert shown.splitlines()[-1] == "Correctness was NOT checked (graphs): this is no checkout"


def test_nothing_is_said_to_be_nothing() -> None:
    assert render([]).endswith("no rows")
