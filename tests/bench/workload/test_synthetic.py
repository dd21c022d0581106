"""The datasets of random tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from baton.bench.workload.dataset_settings import Conversation, DatasetSettings, Turn
from baton.bench.workload.passages import Vocabulary, bare_vocabulary
from baton.bench.workload.registry import make_multi_turn, make_prefix_repetition, make_random
from baton.wire.errors import InvalidSetting


def turns(vocabulary: Vocabulary, **changes: Any) -> list[Turn]:
    workload = make_random(DatasetSettings(**{"num_prompts": 200, "random_input_len": 50, **changes}), vocabulary)
    return [turn for conversation in workload.conversations for turn in conversation.turns]


def test_a_share_of_the_prompts_is_long(words: Vocabulary) -> None:
    made = turns(words, random_long_share=0.2, random_long_input_len=300)
    lengths = [len(turn.token_ids) for turn in made]
    assert Counter(lengths) == {50: 160, 300: 40}
    assert 0 < lengths[:100].count(300) < 40


def test_the_prefix_is_shared_and_comes_on_top(words: Vocabulary) -> None:
    made = turns(words, random_prefix_len=30)
    assert {len(turn.token_ids) for turn in made} == {80}
    assert len({turn.token_ids[:30] for turn in made}) == 1
    assert len({turn.token_ids[30:32] for turn in made}) > 150


def prompts(vocabulary: Vocabulary, **changes: Any) -> list[tuple[int, ...]]:
    short = {"num_prompts": 23, "prefix_repetition_prefix_len": 20, "prefix_repetition_suffix_len": 12}
    workload = make_prefix_repetition(
        DatasetSettings(**{**short, "prefix_repetition_num_prefixes": 5, **changes}), vocabulary
    )
    return [conversation.turns[0].token_ids for conversation in workload.conversations]


@pytest.mark.parametrize("name", ["words", "opened"])
def test_groups_share_their_prefix_and_nothing_more(name: str, request: pytest.FixtureRequest) -> None:
    vocabulary: Vocabulary = request.getfixturevalue(name)
    made = prompts(vocabulary)
    assert {len(prompt) for prompt in made} == {32}
    assert sorted(Counter(prompt[:20] for prompt in made).values()) == [4, 4, 5, 5, 5]
    assert len({prompt[20:] for prompt in made}) == 23


def conversations(vocabulary: Vocabulary, **changes: Any) -> tuple[Conversation, ...]:
    short = {"num_prompts": 60, "multi_turn_system_len": 30, "multi_turn_user_len": 10, "multi_turn_output_len": 8}
    return make_multi_turn(DatasetSettings(**{**short, **changes}), vocabulary).conversations


@pytest.mark.parametrize("name", ["words", "opened"])
def test_conversations_begin_with_the_same_system_prompt(name: str, request: pytest.FixtureRequest) -> None:
    vocabulary: Vocabulary = request.getfixturevalue(name)
    made = conversations(vocabulary)
    assert {tuple(len(turn.token_ids) for turn in conversation.turns) for conversation in made} == {(40, 10, 10, 10)}
    assert len({conversation.turns[0].token_ids[:30] for conversation in made}) == 1
    assert len({turn.token_ids[-10:] for conversation in made for turn in conversation.turns}) == 240
    assert {turn.num_output_tokens for conversation in made for turn in conversation.turns} == {8}


def test_the_range_ratio_spreads_turns_and_lengths(words: Vocabulary) -> None:
    made = conversations(words, multi_turn_range_ratio=0.5)
    assert {len(conversation.turns) for conversation in made} == {2, 3, 4, 5, 6}
    later = [turn for conversation in made for turn in conversation.turns[1:]]
    assert {len(turn.token_ids) for turn in later} == set(range(5, 16))
    assert {turn.num_output_tokens for turn in later} == set(range(4, 13))
    assert {len(conversation.turns[0].token_ids) for conversation in made} <= set(range(35, 46))


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (make_random, {"random_input_len": 0}, "--random-input-len 0 leaves no token for some prompts"),
        (make_random, {"random_input_len": 1, "random_range_ratio": 0.5}, "--random-input-len 1 leaves no token"),
        (make_prefix_repetition, {"num_prompts": 4}, "--num-prompts 4 are fewer than 10 prefixes"),
        (
            make_prefix_repetition,
            {"prefix_repetition_prefix_len": 0, "prefix_repetition_suffix_len": 0},
            "--prefix-repetition-suffix-len must be above 0",
        ),
    ],
)
def test_what_cannot_be_made_is_named(make: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        make(DatasetSettings(**changes), bare_vocabulary(100))
