"""What holds for every dataset, and the flags that several share."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from baton.bench.workload.dataset_settings import DATASET_NAMES, DatasetSettings, Workload
from baton.bench.workload.passages import Vocabulary, bare_vocabulary
from baton.bench.workload.registry import make_workload
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


def test_general_lengths_beat_those_of_the_dataset(settings: DatasetSettings, words: Vocabulary) -> None:
    workload = make_workload(dataclasses.replace(settings, input_len=77, output_len=33), words)
    plain = make_workload(settings, words)
    is_trace = settings.dataset_name in ("mooncake", "azure")
    assert (output_lens(workload) == {33}) is not is_trace
    assert is_trace is (output_lens(workload) == output_lens(plain))
    if settings.dataset_name == "random":
        assert {len(conversation.turns[0].token_ids) for conversation in workload.conversations} == {77}


def output_lens(workload: Workload) -> set[int]:
    return {turn.num_output_tokens for conversation in workload.conversations for turn in conversation.turns}


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
