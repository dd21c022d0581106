from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from bench.workload.shared_prefix import make

from bench.workload.dataset_settings import DatasetSettings
from bench.workload.vocabulary import Vocabulary, bare_vocabulary
from wire.errors import InvalidSetting


def prompts(vocabulary: Vocabulary, **changes: Any) -> list[tuple[int, ...]]:
    short = {"num_prompts": 23, "prefix_repetition_prefix_len": 20, "prefix_repetition_suffix_len": 12}
    workload = make(DatasetSettings(**{**short, "prefix_repetition_num_prefixes": 5, **changes}), vocabulary)
    return [conversation.turns[0].token_ids for conversation in workload.conversations]


@pytest.mark.parametrize("name", ["words", "opened"])
def test_groups_share_their_prefix_and_nothing_more(name: str, request: pytest.FixtureRequest) -> None:
    vocabulary: Vocabulary = request.getfixturevalue(name)
    made = prompts(vocabulary)
    assert {len(prompt) for prompt in made} == {32}
    assert sorted(Counter(prompt[:20] for prompt in made).values()) == [4, 4, 5, 5, 5]
    assert len({prompt[20:] for prompt in made}) == 23


def test_groups_come_mixed(words: Vocabulary) -> None:
    order = [prompt[:20] for prompt in prompts(words)]
    assert order != [order[index % 5] for index in range(23)]
    assert order != sorted(order)


def test_one_part_may_be_empty(opened: Vocabulary) -> None:
    assert len(set(prompts(opened, prefix_repetition_suffix_len=0))) == 5
    assert len(set(prompts(opened, prefix_repetition_prefix_len=0))) == 23


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_prompts": 4}, "--num-prompts 4 is less than --prefix-repetition-num-prefixes 5"),
        ({"prefix_repetition_num_prefixes": 0}, "--prefix-repetition-num-prefixes 0 is not at least 1"),
        ({"prefix_repetition_output_len": 0}, "--prefix-repetition-output-len 0 is not at least 1"),
        ({"prefix_repetition_suffix_len": -1}, "--prefix-repetition-suffix-len -1 is not at least 0"),
        ({"prefix_repetition_prefix_len": -1}, "--prefix-repetition-prefix-len -1 is not at least 0"),
        (
            {"prefix_repetition_prefix_len": 0, "prefix_repetition_suffix_len": 0},
            "--prefix-repetition-prefix-len and -suffix-len together: 0 is not at least 1",
        ),
    ],
)
def test_what_cannot_be_made_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        prompts(bare_vocabulary(100), **changes)
