from __future__ import annotations

import pytest
from bench.serve.slo import meets, parse_slo

from bench.serve.timing import timing_of
from tests.bench.serve.outcomes import answered
from wire.errors import InvalidSetting


def test_goals_are_words_or_one_word_with_commas() -> None:
    assert parse_slo(["ttft:200", "tpot:50.5"]) == {"ttft": 200.0, "tpot": 50.5}
    assert parse_slo(["ttft:200, e2el:9000", "itl:80"]) == {"ttft": 200.0, "e2el": 9000.0, "itl": 80.0}
    assert parse_slo([]) == {}


@pytest.mark.parametrize(
    "word", ["ttft", "ttft:", "ttft:fast", "ttft:-1", "ttft:nan", "ttft:inf", "tbt:5", "", "ttft:1,ttft:2", "ttft=5"]
)
def test_a_goal_that_is_none_is_an_error(word: str) -> None:
    with pytest.raises(InvalidSetting, match="--goodput"):
        parse_slo([word])


@pytest.mark.parametrize(
    ("slo", "is_good"),
    [
        ({"ttft": 250.0}, True),
        ({"ttft": 249.0}, False),
        ({"tpot": 250.0}, True),
        ({"tpot": 249.0}, False),
        ({"itl": 375.0}, True),
        ({"itl": 374.0}, False),
        ({"e2el": 750.0}, True),
        ({"e2el": 749.0}, False),
        ({"ttft": 250.0, "itl": 374.0}, False),
        ({}, True),
    ],
)
def test_limits_are_inclusive_and_all_of_them_count(slo: dict[str, float], is_good: bool) -> None:
    assert meets(timing_of(answered([0.25, 0.375, 0.75])), slo) is is_good


def test_an_answer_of_one_token_meets_every_goal_between_tokens() -> None:
    assert meets(timing_of(answered([0.25])), {"tpot": 0.0, "itl": 0.0})
