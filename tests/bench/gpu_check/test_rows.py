from __future__ import annotations

import math

import pytest

from baton.bench.gpu_check.rows import Row, Verdict, exit_status, failed_row, missing_row, speed_row

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
