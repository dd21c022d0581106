from __future__ import annotations

from typing import Any

import pytest
from bench.workload.multi_turn import make

from bench.workload.dataset_settings import DatasetSettings
from bench.workload.turns import Conversation
from bench.workload.vocabulary import Vocabulary, bare_vocabulary
from wire.errors import InvalidSetting


def conversations(vocabulary: Vocabulary, **changes: Any) -> tuple[Conversation, ...]:
    short = {"num_prompts": 60, "multi_turn_system_len": 30, "multi_turn_user_len": 10, "multi_turn_output_len": 8}
    return make(DatasetSettings(**{**short, **changes}), vocabulary).conversations


@pytest.mark.parametrize("name", ["words", "opened"])
def test_conversations_begin_with_the_same_system_prompt(name: str, request: pytest.FixtureRequest) -> None:
    vocabulary: Vocabulary = request.getfixturevalue(name)
    made = conversations(vocabulary)
    assert {tuple(len(turn.token_ids) for turn in conversation.turns) for conversation in made} == {(40, 10, 10, 10)}
    assert len({conversation.turns[0].token_ids[:30] for conversation in made}) == 1
    assert len({turn.token_ids[-10:] for conversation in made for turn in conversation.turns}) == 240
    assert {turn.num_output_tokens for conversation in made for turn in conversation.turns} == {8}


def test_only_the_first_turn_has_what_begins_a_text(opened: Vocabulary) -> None:
    for conversation in conversations(opened):
        assert conversation.turns[0].token_ids[:1] == opened.opening_ids
        assert not any(set(turn.token_ids) & opened.special_ids for turn in conversation.turns[1:])


def test_the_range_ratio_spreads_turns_and_lengths(words: Vocabulary) -> None:
    made = conversations(words, multi_turn_range_ratio=0.5)
    assert {len(conversation.turns) for conversation in made} == {2, 3, 4, 5, 6}
    later = [turn for conversation in made for turn in conversation.turns[1:]]
    assert {len(turn.token_ids) for turn in later} == set(range(5, 16))
    assert {turn.num_output_tokens for turn in later} == set(range(4, 13))
    assert {len(conversation.turns[0].token_ids) for conversation in made} <= set(range(35, 46))


def test_there_need_be_no_system_prompt_and_no_second_turn(words: Vocabulary) -> None:
    made = conversations(words, multi_turn_system_len=0, multi_turn_num_turns=1)
    assert {tuple(len(turn.token_ids) for turn in conversation.turns) for conversation in made} == {(10,)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"multi_turn_num_turns": 0}, "--multi-turn-num-turns 0 is not at least 1"),
        ({"multi_turn_system_len": -1}, "--multi-turn-system-len -1 is not at least 0"),
        ({"multi_turn_user_len": 0}, "--multi-turn-user-len 0 is not at least 1"),
        ({"multi_turn_output_len": 0}, "--multi-turn-output-len 0 is not at least 1"),
        ({"multi_turn_range_ratio": 1.5}, "--multi-turn-range-ratio 1.5 is not in"),
    ],
)
def test_what_cannot_be_made_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        conversations(bare_vocabulary(100), **changes)
