from __future__ import annotations

import pytest

from tests.bench.mock_server.schedule import Answer, Fault, FaultKind, Script, Steady


def test_a_gap_of_nothing_joins_writes() -> None:
    answer = Answer(1.0, (0.0, 0.5, 0.25, 0.0, 0.0))
    assert answer.writes() == [(1.0, 2), (1.5, 3), (1.75, 6)]
    assert Answer(2.0).writes() == [(2.0, 1)]


def test_tokens_and_texts_begin_again_at_their_end() -> None:
    answer = Answer(0.0, (0.0,) * 4, (1, 3), ("a", "b"))
    assert [answer.num_tokens(num_chunks) for num_chunks in range(6)] == [0, 1, 4, 5, 8, 9]
    assert answer.text(1, 4) == "bab"


def test_a_script_begins_again_at_its_end() -> None:
    answers = (Answer(0.1), Answer(0.2))
    assert [Script(answers).answer(number, 9) for number in range(3)] == [*answers, answers[0]]


def test_a_steady_answer_has_the_tokens_that_were_asked_for() -> None:
    answer = Steady(0.5, 0.1, tokens_per_chunk=4).answer(0, 10)
    assert (answer.tokens_per_chunk, answer.num_tokens(answer.num_chunks)) == ((4, 4, 2), 10)
    assert answer.ttft_s == 0.5
    assert answer.gaps_s == pytest.approx((0.4, 0.4))


def test_random_times_stay_around_their_value_and_come_again() -> None:
    schedule = Steady(0.5, 0.1, jitter=0.2, seed=7)
    answer = schedule.answer(3, 200)
    assert 0.4 <= answer.ttft_s <= 0.6
    assert all(0.08 <= gap_s <= 0.12 for gap_s in answer.gaps_s)
    assert max(answer.gaps_s) - min(answer.gaps_s) > 0.03
    assert schedule.answer(3, 200) == answer
    assert schedule.answer(4, 200) != answer
    assert Steady(0.5, 0.1, jitter=0.2, seed=8).answer(3, 200) != answer


def test_a_fault_befalls_its_share() -> None:
    fault = Fault(FaultKind.CUT, 1)
    schedule = Steady(0.5, 0.1, fault=fault, fault_share=0.25)
    faults = [schedule.answer(number, 1).fault for number in range(1000)]
    assert 200 < faults.count(fault) < 300
    assert faults.count(None) == 1000 - faults.count(fault)
    assert Steady(0.5, 0.1, fault=fault, fault_share=1.0).answer(0, 1).fault == fault
