"""What holds for every dataset, and the dataset of random tokens."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest

from baton.bench.workload.dataset_settings import DATASET_NAMES, DatasetSettings, Prompt
from baton.bench.workload.passages import Vocabulary, bare_vocabulary
from baton.bench.workload.registry import make_workload
from baton.wire.errors import InvalidSetting


@pytest.fixture(params=DATASET_NAMES)
def settings(request: pytest.FixtureRequest) -> DatasetSettings:
    """Every dataset."""
    return DatasetSettings(dataset_name=request.param, num_prompts=20, length_divisor=32)


def test_the_seed_decides(settings: DatasetSettings, words: Vocabulary) -> None:
    first, other = settings, dataclasses.replace(settings, seed=1)
    assert make_workload(first, words) == make_workload(first, words)
    assert make_workload(first, words).prompts != make_workload(other, words).prompts


def test_a_server_makes_the_same_tokens_of_the_text(settings: DatasetSettings, opened: Vocabulary) -> None:
    workload = make_workload(settings, opened)
    assert len(workload.prompts) == workload.facts["num_requests"] == 20
    assert opened.tokenizer is not None
    for prompt in workload.prompts:
        assert tuple(opened.tokenizer.encode(prompt.text)) == prompt.token_ids


def test_ids_alone_need_no_tokenizer(settings: DatasetSettings) -> None:
    prompt = make_workload(settings, bare_vocabulary(100)).prompts[0]
    assert prompt.text == ""
    assert 0 < max(prompt.token_ids) < 100


def prompts(vocabulary: Vocabulary, **changes: Any) -> tuple[Prompt, ...]:
    settings = DatasetSettings(**{"num_prompts": 200, "random_input_len": 50, **changes})
    return make_workload(settings, vocabulary).prompts


def test_lengths_are_those_asked_for(words: Vocabulary) -> None:
    made = prompts(words, random_input_len=77, random_output_len=33, random_range_ratio=0.5)
    assert {38, 116} <= {len(prompt.token_ids) for prompt in made} <= set(range(38, 117))
    assert {prompt.num_output_tokens for prompt in made} <= set(range(16, 51))


def test_a_share_of_the_prompts_is_long(words: Vocabulary) -> None:
    lengths = [len(prompt.token_ids) for prompt in prompts(words, random_long_share=0.2, random_long_input_len=300)]
    assert Counter(lengths) == {50: 160, 300: 40}
    assert 0 < lengths[:100].count(300) < 40


def test_the_prefix_is_shared_and_comes_on_top(words: Vocabulary) -> None:
    made = prompts(words, random_prefix_len=30)
    assert {len(prompt.token_ids) for prompt in made} == {80}
    assert len({prompt.token_ids[:30] for prompt in made}) == 1
    assert len({prompt.token_ids[30:32] for prompt in made}) > 150


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset_name": "azure", "dataset_path": "/nowhere"}, "--dataset-path /nowhere: .*No such file"),
        ({"random_input_len": 0}, "--random-input-len 0 leaves no token"),
    ],
)
def test_what_cannot_be_made_is_named(changes: dict[str, Any], message: str, words: Vocabulary) -> None:
    with pytest.raises(InvalidSetting, match=message):
        make_workload(DatasetSettings(**changes), words)
