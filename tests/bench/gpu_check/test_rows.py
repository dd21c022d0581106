from __future__ import annotations

import json
import math

import pytest

from bench.gpu_check.rows import (
    Row,
    Verdict,
    count_row,
    error_row,
    exit_status,
    failed_row,
    figure_row,
    least_row,
    limit_row,
    missing_row,
    rate_row,
    time_row,
    worst_of,
)

OK = error_row("error", "case", 1.0, 2.0)
WRONG = error_row("error", "case", 3.0, 2.0)
SLOW = time_row("step", "case", 9.0, "ms", floor=3.0, share=0.75)


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (error_row("e", "c", 0.1, 0.1), Verdict.OK),
        (error_row("e", "c", 0.11, 0.1), Verdict.WRONG),
        (error_row("e", "c", math.nan, 0.1), Verdict.WRONG),
        (error_row("e", "c", math.inf, 0.1), Verdict.WRONG),
        (count_row("c", "c", 0, 5), Verdict.OK),
        (count_row("c", "c", 1, 5), Verdict.WRONG),
        (count_row("c", "c", 0, 0), Verdict.FAILED),
        (time_row("t", "c", 4.0, "ms", floor=3.0, share=0.75), Verdict.OK),
        (time_row("t", "c", 4.01, "ms", floor=3.0, share=0.75), Verdict.BELOW),
        (time_row("t", "c", 400.0, "ms", floor=3.0), Verdict.MEASURED),
        (time_row("t", "c", 2.0, "ms", floor=3.0, share=0.75), Verdict.DOUBTED),
        (time_row("t", "c", math.nan, "ms", floor=3.0, share=0.75), Verdict.DOUBTED),
        (rate_row("r", "c", 60.0, "TFLOP/s", ceiling=100.0, share=0.6), Verdict.OK),
        (rate_row("r", "c", 59.0, "TFLOP/s", ceiling=100.0, share=0.6), Verdict.BELOW),
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
    rate = rate_row("rate", "case", 30.0, "GB/s", ceiling=40.0, share=0.5)
    assert (rate.target, rate.share) == (20.0, 0.75)
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


@pytest.mark.parametrize("row", [OK, SLOW, error_row("e", "c", math.nan, 1.0), missing_row("m", "c", "x", num_cases=4)])
def test_rows_travel_as_json(row: Row) -> None:
    assert Row.from_json(json.loads(json.dumps(row.as_json(), allow_nan=False))) == row


def test_the_worst_of_errors_is_never_hidden_by_a_nan() -> None:
    assert worst_of([1.0, 3.0, 2.0]) == 3.0
    assert math.isnan(worst_of([1.0, math.nan, 2.0]))
    assert math.isnan(worst_of([math.nan, 1.0]))
    assert math.isnan(worst_of([]))
