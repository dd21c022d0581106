"""Floors, and what is made of a relay's answers. Expected values are worked out by hand."""

from __future__ import annotations

import pytest

from baton.bench.gpu_check.relay_process import rows_of_answers
from baton.bench.gpu_check.rows import Verdict
from baton.bench.gpu_check.setup_process import busy_us, gb_per_s
from tests.bench.gpu_check.outcomes import answered


def test_what_overlaps_counts_once() -> None:
    assert busy_us([(0, 10), (5, 12), (20, 25), (21, 22)]) == 17
    assert gb_per_s(10**9, 1000.0) == pytest.approx(1.0)


def test_the_exposed_transfer_is_a_share_of_the_time_to_the_first_token() -> None:
    # 40 ms to the first token; 1 ms from the first token sampled until the KV is ready
    rows = rows_of_answers("case", [answered(ttft_ms=40.0, exposed_ms=1.0) for _ in range(3)])
    assert rows[0].value == pytest.approx(40.0, rel=0.01)
    assert rows[2].value == pytest.approx(2.5, rel=0.01)
    assert rows[2].verdict == Verdict.OK
    assert rows_of_answers("case", [answered(ttft_ms=40.0, exposed_ms=3.0)])[2].verdict == Verdict.BELOW
