"""Datasets of files: ShareGPT's conversations and lines of prompts."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from baton.bench.workload.dataset_settings import DatasetSettings, Workload
from baton.bench.workload.passages import Vocabulary
from baton.bench.workload.registry import make_workload
from baton.wire.errors import InvalidSetting

WORD = " dog"
ROWS = '{"prompt": "the old house", "output_tokens": 10}\n\n{"prompt": "a dog\u2028ran", "output_tokens": 20}\r\n'


def entry(*texts: str) -> dict[str, Any]:
    speakers = ("human", "gpt")
    return {"conversations": [{"from": speakers[n % 2], "value": text} for n, text in enumerate(texts)]}


def sharegpt(folder: Path, entries: Any, vocabulary: Vocabulary, **changes: Any) -> Workload:
    path = folder / "talks.json"
    path.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    settings = {"dataset_name": "sharegpt", "dataset_path": str(path), "num_prompts": 4, "disable_shuffle": True}
    return make_workload(DatasetSettings(**{**settings, **changes}), vocabulary)


def lengths(made: Workload) -> list[tuple[int, int]]:
    turns = [conversation.turns[0] for conversation in made.conversations]
    return [(len(turn.token_ids), turn.num_output_tokens) for turn in turns]


def test_the_first_message_is_sent_and_the_second_gives_the_length(words: Vocabulary, tmp_path: Path) -> None:
    entries = [entry(WORD * 5, WORD * 7, WORD * 9), entry(WORD * 6, WORD * 4)]
    made = sharegpt(tmp_path, entries, words, num_prompts=2)
    assert lengths(made) == [(5, 7), (6, 4)]
    assert [conversation.turns[0].text for conversation in made.conversations] == [WORD * 5, WORD * 6]
    assert made.facts["sha256"] == hashlib.sha256((tmp_path / "talks.json").read_bytes()).hexdigest()
    assert made.facts["path"] == str(tmp_path / "talks.json")


@pytest.mark.parametrize(
    ("num_prompt", "num_answer", "is_used"),
    [(3, 9, False), (4, 4, True), (9, 3, False), (1024, 1024, True), (1025, 9, False), (1024, 1025, False)],
)
def test_entries_are_filtered_by_length(
    num_prompt: int, num_answer: int, is_used: bool, words: Vocabulary, tmp_path: Path
) -> None:
    entries = [entry(WORD * num_prompt, WORD * num_answer), entry(WORD * 5, WORD * 5), entry("alone"), entry()]
    made = sharegpt(tmp_path, entries, words, no_oversample=True)
    assert lengths(made) == ([(num_prompt, num_answer), (5, 5)] if is_used else [(5, 5)])
    assert (made.facts["num_entries_used"], made.facts["num_entries_filtered"]) == ((2, 0) if is_used else (1, 1))


def test_a_short_file_is_repeated_or_sent_as_it_is(words: Vocabulary, tmp_path: Path) -> None:
    entries = [entry(WORD * 5, WORD * 5), entry(WORD * 6, WORD * 6)]
    made = sharegpt(tmp_path, entries, words, num_prompts=40)
    assert lengths(made)[:2] == [(5, 5), (6, 6)]
    assert (len(made.conversations), set(lengths(made)[2:])) == (40, {(5, 5), (6, 6)})
    assert (made.facts["num_entries_used"], made.facts["num_requests"]) == (2, 40)
    assert len(sharegpt(tmp_path, entries, words, num_prompts=40, no_oversample=True).conversations) == 2


def custom(folder: Path, content: str, vocabulary: Vocabulary, **changes: Any) -> Workload:
    path = folder / "prompts.jsonl"
    path.write_bytes(content.encode())
    settings = {"dataset_name": "custom", "dataset_path": str(path), "num_prompts": 2, "disable_shuffle": True}
    return make_workload(DatasetSettings(**{**settings, **changes}), vocabulary)


def test_prompts_are_sent_as_they_are(words: Vocabulary, tmp_path: Path) -> None:
    turns = [conversation.turns[0] for conversation in custom(tmp_path, ROWS, words).conversations]
    assert [turn.text for turn in turns] == ["the old house", "a dog\u2028ran"]
    assert [turn.token_ids for turn in turns] == [words.ids_of(turn.text) for turn in turns]
    assert [turn.num_output_tokens for turn in turns] == [256, 256]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("[" * 100_000, "talks.json: it is not JSON"),
        ({"conversations": []}, "talks.json: Input should be a valid list"),
        ([entry(), "text"], r"talks.json: 1: .*'text'"),
        ([entry(), {}], r"talks.json: 1\.conversations: Field required"),
        ([{"conversations": [{"value": 7}] * 2}], r"talks.json: 0\.conversations\.0\.value: .*found 7"),
        ([entry("\ud800", "e f g h")], "talks.json, entry 1: the text has a lone surrogate"),
        ([entry("a", "b")], "no entry has two messages of a length that can be used"),
    ],
)
def test_a_damaged_sharegpt_file_is_an_error_that_says_where(
    entries: Any, message: str, words: Vocabulary, tmp_path: Path
) -> None:
    with pytest.raises(InvalidSetting, match=message):
        sharegpt(tmp_path, entries, words)


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        ("", {}, "prompts.jsonl: it has no prompts"),
        (ROWS + "{", {}, "prompts.jsonl, line 4: it is not JSON"),
        (ROWS + "[]", {}, "prompts.jsonl, line 4: .*found \\[\\]"),
        (ROWS + "{}", {}, "prompts.jsonl, line 4: prompt: Field required"),
        ('{"prompt": ""}', {}, "prompts.jsonl, line 1: prompt: .*at least 1 character"),
        ('{"prompt": "a"}', {"custom_output_len": -1}, "line 1: output_tokens: .*found None"),
        ('{"prompt": "a", "output_tokens": "5"}', {"custom_output_len": -1}, "line 1: output_tokens: .*found '5'"),
        ('{"prompt": "a", "output_tokens": true}', {"custom_output_len": -1}, "output_tokens: .*found True"),
        (ROWS, {"custom_output_len": 0}, "--custom-output-len 0 is neither above 0 nor -1"),
    ],
)
def test_a_damaged_custom_file_is_an_error_that_says_where(
    content: str, changes: dict[str, Any], message: str, words: Vocabulary, tmp_path: Path
) -> None:
    with pytest.raises(InvalidSetting, match=message):
        custom(tmp_path, content, words, **changes)
