from __future__ import annotations

import json
import math

import pytest

from bench.gpu_check.rows import (
    Row,
    Verdict,
    exit_status,
    failed_row,
    figure_row,
    least_row,
    limit_row,
    missing_row,
    rate_row,
    time_row,
)

OK = Row("error", "case", 1.0, "of max", 2.0, None, Verdict.OK)
WRONG = Row("error", "case", 3.0, "of max", 2.0, None, Verdict.WRONG)
SLOW = time_row("step", "case", 9.0, "ms", floor=3.0, share=0.75)


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (time_row("t", "c", 4.0, "ms", floor=3.0, share=0.75), Verdict.OK),
        (time_row("t", "c", 4.01, "ms", floor=3.0, share=0.75), Verdict.BELOW),
        (time_row("t", "c", 400.0, "ms", floor=3.0), Verdict.MEASURED),
        (time_row("t", "c", 2.0, "ms", floor=3.0, share=0.75), Verdict.DOUBTED),
        (time_row("t", "c", math.nan, "ms", floor=3.0, share=0.75), Verdict.DOUBTED),
        (rate_row("r", "c", 60.0, "TFLOP/s", ceiling=100.0), Verdict.MEASURED),
        (rate_row("r", "c", 107.0, "GB/s", ceiling=100.0), Verdict.DOUBTED),
        (limit_row("l", "c", 299.0, "us", 300.0), Verdict.OK),
        (limit_row("l", "c", 301.0, "us", 300.0), Verdict.BELOW),
        (least_row("l", "c", 1.0, "times", 1.0), Verdict.OK),
        (least_row("l", "c", 0.9, "times", 1.0), Verdict.BELOW),
        (figure_row("f", "c", 1.0, "ms"), Verdict.MEASURED),
        (missing_row("m", "c", "no nixl"), Verdict.NOT_RUN),
        (failed_row("f", "c", "crashed"), Verdict.FAILED),
    ],
)
def test_verdicts(row: Row, verdict: Verdict) -> None:
    assert row.verdict == verdict


def test_a_target_is_a_share_of_the_machines_limit() -> None:
    assert SLOW.target == 4.0
    assert SLOW.share == pytest.approx(1 / 3)
    assert rate_row("rate", "case", 30.0, "GB/s", ceiling=40.0).share == 0.75
    assert OK.share is None


@pytest.mark.parametrize(
    ("rows", "status", "strict_status"),
    [
        ([OK], 0, 0),
        ([OK, WRONG], 1, 1),
        ([OK, failed_row("f", "c", "it hung")], 1, 1),
        ([OK, SLOW], 0, 1),
        ([OK, time_row("t", "c", 1.0, "ms", floor=3.0)], 0, 1),
        ([OK, missing_row("m", "c", "one GPU"), figure_row("f", "c", 1.0, "ms")], 0, 0),
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
    assert figure_row("f", "c", 1.0, "ms").where_no_gpu_is().verdict == Verdict.MEANINGLESS
    for row in (OK, WRONG, failed_row("f", "c", "x"), missing_row("m", "c", "x")):
        assert row.where_no_gpu_is() == row
    assert exit_status([SLOW.where_no_gpu_is()], strict=True) == 0


@pytest.mark.parametrize("row", [OK, SLOW, figure_row("e", "c", math.nan, "ms"), missing_row("m", "c", "x")])
def test_rows_travel_as_json(row: Row) -> None:
    assert Row.from_json(json.loads(json.dumps(row.as_json(), allow_nan=False))) == row
