"""What holds for every dataset, and the flags that several share."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from baton.bench.workload.dataset_settings import DATASET_NAMES, Conversation, DatasetSettings, Turn
from baton.bench.workload.passages import Vocabulary, bare_vocabulary
from baton.bench.workload.registry import make_multi_turn, make_prefix_repetition, make_random, make_workload
from baton.wire.errors import InvalidSetting

SENTENCE = "once there was a dog and it ran to the old house by the river"


@pytest.fixture(params=DATASET_NAMES)
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> DatasetSettings:
    """Every dataset, with a file where it needs one."""
    name: str = request.param
    path = tmp_path / name
    if name == "sharegpt":
        said = [{"from": "human", "value": f"{SENTENCE} {'again ' * n}"} for n in range(30)]
        path.write_text(json.dumps([{"conversations": [message, message]} for message in said]))
    elif name == "custom":
        path.write_text("\n".join(json.dumps({"prompt": f"{SENTENCE} {'again ' * n}"}) for n in range(30)))
    given = str(path) if path.exists() else ""
    return DatasetSettings(dataset_name=name, dataset_path=given, num_prompts=20, length_divisor=32)


def test_the_seed_decides(settings: DatasetSettings, words: Vocabulary) -> None:
    first, other = settings, dataclasses.replace(settings, seed=1)
    assert make_workload(first, words) == make_workload(first, words)
    assert make_workload(first, words).conversations != make_workload(other, words).conversations


def test_a_server_makes_the_same_tokens_of_the_text(settings: DatasetSettings, opened: Vocabulary) -> None:
    workload = make_workload(settings, opened)
    assert len(workload.conversations) == workload.facts["num_conversations"] == 20
    assert opened.tokenizer is not None
    for conversation in workload.conversations:
        assert tuple(opened.tokenizer.encode(conversation.turns[0].text)) == conversation.turns[0].token_ids
        for turn in conversation.turns[1:]:
            assert opened.ids_of(turn.text) == turn.token_ids
    assert workload.facts["text_mismatch"] == {"num_prompts": 0, "num_tokens": 0}


def test_random_tokens_need_no_tokenizer_and_texts_do(settings: DatasetSettings) -> None:
    if settings.dataset_name in ("sharegpt", "custom"):
        with pytest.raises(InvalidSetting, match="needs a tokenizer: name its folder with --tokenizer"):
            make_workload(settings, bare_vocabulary(100))
    else:
        turn = make_workload(settings, bare_vocabulary(100)).conversations[0].turns[0]
        assert turn.text == ""
        assert 0 < max(turn.token_ids) < 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset_name": "sonnet"}, "--dataset-name 'sonnet' is not one of random, prefix_repetition, "),
        ({"output_len": 10**9}, "--output-len: 1000000000 is not from 1 to 16777216"),
        ({"dataset_name": "sharegpt"}, "--dataset-name sharegpt needs a file: give it with --dataset-path"),
        ({"dataset_name": "custom", "dataset_path": "/nowhere"}, "--dataset-path /nowhere: .*No such file"),
        ({"dataset_name": "custom", "dataset_path": "/"}, "--dataset-path /: .*Is a directory"),
    ],
)
def test_what_cannot_be_made_is_named(changes: dict[str, Any], message: str, words: Vocabulary) -> None:
    with pytest.raises(InvalidSetting, match=message):
        make_workload(DatasetSettings(**changes), words)


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
def test_random_prompts_that_cannot_be_made_are_named(make: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        make(DatasetSettings(**changes), bare_vocabulary(100))
