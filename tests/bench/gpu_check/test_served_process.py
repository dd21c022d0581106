from __future__ import annotations

import math

import pytest

from bench.gpu_check.exposed_process import exposed_rows
from bench.gpu_check.rows import Verdict
from bench.gpu_check.served_process import Greedy, divergence
from tests.bench.gpu_check.outcomes import answered
from wire.errors import RequestFailed


def test_divergence_is_the_share_before_and_the_mean_difference_up_to_there() -> None:
    exact = [Greedy((1, 2, 3, 4), (-1.0, -1.0, -1.0, -1.0)), Greedy((5, 6, 7, 8), (-2.0, -2.0, -2.0, -2.0))]
    found = [Greedy((1, 2, 9, 9), (-1.5, -1.0, -7.0, -7.0)), Greedy((5, 6, 7, 8), (-2.0, -2.0, -2.0, -2.4))]
    result = divergence(found, exact)
    assert result.same_share == 0.75
    assert result.mean_difference == pytest.approx((0.5 + 0.4) / 6)


def test_no_token_in_common_is_no_number() -> None:
    assert math.isnan(divergence([Greedy((1,), (-1.0,))], [Greedy((2,), (-1.0,))]).mean_difference)


def test_the_exposed_transfer_is_a_share_of_the_time_to_the_first_token() -> None:
    # 40 ms to the first token; 1 ms from the first token drawn until the KV is ready
    rows = exposed_rows("case", [answered(ttft_ms=40.0, exposed_ms=1.0) for _ in range(3)])
    assert rows[0].value == pytest.approx(40.0, rel=0.01)
    assert rows[2].value == pytest.approx(2.5, rel=0.01)
    assert rows[2].verdict == Verdict.OK
    slow = exposed_rows("case", [answered(ttft_ms=40.0, exposed_ms=3.0)])
    assert slow[2].verdict == Verdict.BELOW


def test_an_answer_without_a_handoff_is_refused() -> None:
    outcome = answered(ttft_ms=40.0, exposed_ms=1.0)
    del outcome.usage["kv_transfer"]
    with pytest.raises(RequestFailed, match="without the stamps"):
        exposed_rows("case", [outcome])
