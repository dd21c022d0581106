from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.serve.metrics import timing_of
from tests.bench.serve.outcomes import answered

GAPS_S = st.lists(st.floats(0, 10), min_size=1, max_size=50)


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


def test_the_second_token_may_come_with_the_first() -> None:
    assert timing_of(answered([0.1, 0.5], chunk_tokens=[2, 1])).ttst_s == pytest.approx(0.1)


def test_tpot_uses_the_number_of_tokens_of_usage_where_chunks_do_not_tell() -> None:
    assert timing_of(answered([0.1, 0.5], num_output=5)).tpot_s == pytest.approx(0.1)


def test_events_without_tokens_are_no_arrivals() -> None:
    timing = timing_of(answered([0.01, 0.2, 0.3, 0.9], chunk_tokens=[0, 1, 1, 0]))
    assert timing.ttft_s == pytest.approx(0.2)
    assert timing.e2el_s == pytest.approx(0.3)
    assert timing.gaps_s == pytest.approx((0.1,))


@pytest.mark.parametrize(
    ("reported", "count"), [(7, 7), (0, 0), (None, None), ("7", None), (True, None), (-1, None), (2.5, None)]
)
def test_what_is_no_count_is_not_taken_for_one(reported: object, count: int | None) -> None:
    assert answered([0.1], prompt_tokens_details={"cached_tokens": reported}).num_cached_tokens == count


@given(GAPS_S, st.floats(0, 1e6))
def test_first_token_and_gaps_add_up_to_the_whole(gaps_s: list[float], sent_s: float) -> None:
    chunk_s = [sum(gaps_s[: place + 1]) for place in range(len(gaps_s))]
    timing = timing_of(answered(chunk_s, sent_s=sent_s))
    assert timing.ttft_s + sum(timing.gaps_s) == pytest.approx(timing.e2el_s, abs=1e-6)
    if timing.tpot_s is not None:
        assert timing.ttft_s + timing.tpot_s * (len(chunk_s) - 1) == pytest.approx(timing.e2el_s, abs=1e-6)
        assert timing.max_gap_s is not None
        assert timing.max_gap_s >= timing.tpot_s - 1e-9
