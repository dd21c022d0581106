from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench.workload.custom import make
from bench.workload.workload import Workload

from bench.workload.dataset_settings import DatasetSettings
from bench.workload.vocabulary import Vocabulary
from wire.errors import InvalidSetting

ROWS = '{"prompt": "the old house", "output_tokens": 10}\n\n{"prompt": "a dog\u2028ran", "output_tokens": 20}\r\n'


def workload(folder: Path, content: str, vocabulary: Vocabulary, **changes: Any) -> Workload:
    path = folder / "prompts.jsonl"
    path.write_bytes(content.encode())
    settings = {"dataset_name": "custom", "dataset_path": str(path), "num_prompts": 2, "disable_shuffle": True}
    return make(DatasetSettings(**{**settings, **changes}), vocabulary)


def test_prompts_are_sent_as_they_are(words: Vocabulary, tmp_path: Path) -> None:
    turns = [conversation.turns[0] for conversation in workload(tmp_path, ROWS, words).conversations]
    assert [turn.text for turn in turns] == ["the old house", "a dog\u2028ran"]
    assert [turn.token_ids for turn in turns] == [words.ids_of(turn.text) for turn in turns]
    assert [turn.num_output_tokens for turn in turns] == [256, 256]


def test_the_file_gives_the_lengths_when_asked_to(words: Vocabulary, tmp_path: Path) -> None:
    made = workload(tmp_path, ROWS, words, custom_output_len=-1, num_prompts=5)
    assert [conversation.turns[0].num_output_tokens for conversation in made.conversations[:2]] == [10, 20]
    assert (made.facts["num_entries_used"], made.facts["num_requests"]) == (2, 5)


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        ("", {}, "prompts.jsonl: it has no prompts"),
        (ROWS + "{", {}, "prompts.jsonl, line 4: it is not JSON"),
        (ROWS + "[]", {}, "prompts.jsonl, line 4: expected an object"),
        (ROWS + "{}", {}, "prompts.jsonl, line 4: 'prompt' is missing"),
        ('{"prompt": ["a"]}', {}, "prompts.jsonl, line 1: 'prompt' is .*, not a text"),
        ('{"prompt": ""}', {}, "prompts.jsonl, line 1: 'prompt' is empty"),
        ('{"prompt": "a"}', {"custom_output_len": -1}, "prompts.jsonl, line 1: 'output_tokens' is missing"),
        ('{"prompt": "a", "output_tokens": "5"}', {"custom_output_len": -1}, "line 1: 'output_tokens' is '5', not a"),
        ('{"prompt": "a", "output_tokens": true}', {"custom_output_len": -1}, "'output_tokens' is True, not a whole"),
        ('{"prompt": "a", "output_tokens": 0}', {"custom_output_len": -1}, "'output_tokens' is 0, not a whole number"),
        (ROWS, {"custom_output_len": 0}, "--custom-output-len 0 is not at least 1"),
    ],
)
def test_what_cannot_be_used_is_an_error_that_says_where(
    content: str, changes: dict[str, Any], message: str, words: Vocabulary, tmp_path: Path
) -> None:
    with pytest.raises(InvalidSetting, match=message):
        workload(tmp_path, content, words, **changes)
