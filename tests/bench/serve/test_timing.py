from __future__ import annotations

import pytest

from baton.bench.serve.metrics import timing_of
from tests.bench.serve.outcomes import answered


def test_times_of_an_answer_are_what_the_definitions_say() -> None:
    timing = timing_of(answered([0.2, 0.25, 0.40, 0.45], sent_s=100.0))
    assert timing.ttft_s == pytest.approx(0.2)
    assert timing.e2el_s == pytest.approx(0.45)
    assert timing.tpot_s == pytest.approx(0.25 / 3)
    assert timing.ttst_s == pytest.approx(0.25)
    assert timing.gaps_s == pytest.approx((0.05, 0.15, 0.05))
    assert timing.max_gap_s == pytest.approx(0.15)


def test_an_answer_of_one_token_has_neither_tpot_nor_second_token_nor_gap() -> None:
    timing = timing_of(answered([0.2]))
    assert (timing.tpot_s, timing.ttst_s, timing.max_gap_s) == (None, None, None)
    assert timing.ttft_s == timing.e2el_s


def test_a_chunk_of_several_tokens_is_one_gap_but_all_its_tokens_count_in_tpot() -> None:
    timing = timing_of(answered([0.1, 0.5], chunk_tokens=[1, 4]))
    assert timing.gaps_s == pytest.approx((0.4,))
    assert timing.tpot_s == pytest.approx(0.1)


def test_tpot_uses_the_number_of_tokens_of_usage_where_chunks_do_not_tell() -> None:
    assert timing_of(answered([0.1, 0.5], num_output=5)).tpot_s == pytest.approx(0.1)


def test_events_without_tokens_are_no_arrivals() -> None:
    timing = timing_of(answered([0.01, 0.2, 0.3, 0.9], chunk_tokens=[0, 1, 1, 0]))
    assert timing.ttft_s == pytest.approx(0.2)
    assert timing.e2el_s == pytest.approx(0.3)
    assert timing.gaps_s == pytest.approx((0.1,))
