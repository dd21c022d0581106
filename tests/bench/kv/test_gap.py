from __future__ import annotations

import pytest

from baton.bench.client.outcome import Outcome
from baton.bench.kv.command import describe_gaps
from baton.wire.errors import RequestFailed


def stream(first_gap_s: float, gap_s: float, exposed_ms: float | None = None) -> Outcome:
    usage = {} if exposed_ms is None else {"kv_transfer": {"exposed_ms": exposed_ms}}
    came_s = [1.2, 1.2 + first_gap_s, 1.2 + first_gap_s + gap_s]
    return Outcome(0, 0, "", 1.0, sent_s=1.0, chunk_s=came_s, usage=usage)


def test_the_first_gap_is_held_against_the_others() -> None:
    shown = describe_gaps([stream(0.015, 0.010, 2.5), stream(0.018, 0.012, 3.5), stream(0.030, 0.011, 3.0)])
    assert "median   200.00 ms" in shown
    assert "token 1 to 2  median    18.00 ms" in shown
    assert "later gaps             median    11.00 ms" in shown
    assert "1.64" in shown
    assert "exposed transfer       median     3.00 ms" in shown


def test_answers_without_gaps_are_no_measurement() -> None:
    with pytest.raises(RequestFailed, match="fewer than three"):
        describe_gaps([Outcome(0, 0, "", 0.0, chunk_s=[1.0, 2.0])])
