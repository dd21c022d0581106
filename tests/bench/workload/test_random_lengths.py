from __future__ import annotations

from typing import Any

import pytest
from bench.workload.random_lengths import make

from bench.workload.dataset_settings import DatasetSettings
from bench.workload.turns import Turn
from bench.workload.vocabulary import Vocabulary, bare_vocabulary
from wire.errors import InvalidSetting


def turns(vocabulary: Vocabulary, **changes: Any) -> list[Turn]:
    workload = make(DatasetSettings(**{"num_prompts": 200, "random_input_len": 50, **changes}), vocabulary)
    return [turn for conversation in workload.conversations for turn in conversation.turns]


def test_lengths_are_those_asked_for(words: Vocabulary) -> None:
    made = turns(words, random_output_len=9)
    assert {len(turn.token_ids) for turn in made} == {50}
    assert {turn.num_output_tokens for turn in made} == {9}
    assert len({turn.token_ids for turn in made}) == 200


def test_the_range_ratio_spreads_both_lengths(words: Vocabulary) -> None:
    made = turns(words, random_output_len=20, random_range_ratio=0.5)
    assert {len(turn.token_ids) for turn in made} >= {25, 75}
    assert {turn.num_output_tokens for turn in made} == set(range(10, 31))
    assert all(25 <= len(turn.token_ids) <= 75 for turn in made)


def test_the_prefix_is_shared_and_comes_on_top(words: Vocabulary) -> None:
    made = turns(words, random_prefix_len=30)
    assert {len(turn.token_ids) for turn in made} == {80}
    assert len({turn.token_ids[:30] for turn in made}) == 1
    assert len({turn.token_ids[30:32] for turn in made}) > 150


def test_what_a_server_adds_is_taken_off_the_input_and_not_off_the_prefix(opened: Vocabulary) -> None:
    made = turns(opened, random_prefix_len=30)
    assert {len(turn.token_ids) for turn in made} == {80}
    assert {turn.token_ids[:1] for turn in made} == {opened.opening_ids}
    assert len({turn.token_ids[:31] for turn in made}) == 1


def test_prompts_of_pieces_have_the_length_asked_for(pieces: Vocabulary) -> None:
    workload = make(DatasetSettings(num_prompts=50, random_input_len=100, random_prefix_len=20), pieces)
    off = [len(conversation.turns[0].token_ids) - 120 for conversation in workload.conversations]
    assert workload.facts["text_mismatch"] == {
        "num_prompts": sum(surplus != 0 for surplus in off),
        "num_tokens": sum(map(abs, off)),
    }
    assert sum(surplus == 0 for surplus in off) >= 45


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"random_input_len": -1}, "--random-input-len -1 is not at least 0"),
        ({"random_input_len": 0}, "--random-input-len 0 leaves no token for some prompts"),
        ({"random_input_len": 1, "random_range_ratio": 0.5}, "--random-input-len 1 leaves no token"),
        ({"random_output_len": 0}, "--random-output-len 0 is not at least 1"),
        ({"random_prefix_len": -1}, "--random-prefix-len -1 is not at least 0"),
        ({"random_range_ratio": 1.0}, r"--random-range-ratio 1.0 is not in \[0, 1\)"),
        ({"random_range_ratio": -0.1}, r"--random-range-ratio -0.1 is not in"),
        ({"random_range_ratio": float("nan")}, r"--random-range-ratio nan is not in"),
    ],
)
def test_what_cannot_be_made_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        turns(bare_vocabulary(100), **changes)


def test_a_prefix_alone_is_a_prompt() -> None:
    assert {len(turn.token_ids) for turn in turns(bare_vocabulary(9), random_input_len=0, random_prefix_len=4)} == {4}
