from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from bench.workload.sharegpt import make
from bench.workload.workload import Workload

from bench.workload.dataset_settings import DatasetSettings
from bench.workload.vocabulary import Vocabulary
from wire.errors import InvalidSetting

WORD = " dog"


def entry(*texts: str) -> dict[str, Any]:
    speakers = ("human", "gpt")
    return {"conversations": [{"from": speakers[n % 2], "value": text} for n, text in enumerate(texts)]}


def workload(folder: Path, entries: Any, vocabulary: Vocabulary, **changes: Any) -> Workload:
    path = folder / "talks.json"
    path.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    settings = {"dataset_name": "sharegpt", "dataset_path": str(path), "num_prompts": 4, "disable_shuffle": True}
    return make(DatasetSettings(**{**settings, **changes}), vocabulary)


def lengths(made: Workload) -> list[tuple[int, int]]:
    turns = [conversation.turns[0] for conversation in made.conversations]
    return [(len(turn.token_ids), turn.num_output_tokens) for turn in turns]


def test_the_first_message_is_sent_and_the_second_gives_the_length(words: Vocabulary, tmp_path: Path) -> None:
    entries = [entry(WORD * 5, WORD * 7, WORD * 9), entry(WORD * 6, WORD * 4)]
    made = workload(tmp_path, entries, words, num_prompts=2)
    assert lengths(made) == [(5, 7), (6, 4)]
    assert [conversation.turns[0].text for conversation in made.conversations] == [WORD * 5, WORD * 6]
    assert made.facts["sha256"] == hashlib.sha256((tmp_path / "talks.json").read_bytes()).hexdigest()
    assert made.facts["path"] == str(tmp_path / "talks.json")


def test_what_begins_a_text_is_counted_in_both(opened: Vocabulary, tmp_path: Path) -> None:
    assert lengths(workload(tmp_path, [entry(WORD * 5, WORD * 7)], opened, num_prompts=1)) == [(6, 8)]


@pytest.mark.parametrize(
    ("num_prompt", "num_answer", "is_used"),
    [(3, 9, False), (4, 4, True), (9, 3, False), (1024, 1024, True), (1025, 9, False), (1024, 1025, False)],
)
def test_entries_are_filtered_by_length(
    num_prompt: int, num_answer: int, is_used: bool, words: Vocabulary, tmp_path: Path
) -> None:
    entries = [entry(WORD * num_prompt, WORD * num_answer), entry(WORD * 5, WORD * 5), entry("alone"), entry()]
    made = workload(tmp_path, entries, words, no_oversample=True)
    assert lengths(made) == ([(num_prompt, num_answer), (5, 5)] if is_used else [(5, 5)])
    assert (made.facts["num_entries_used"], made.facts["num_entries_filtered"]) == ((2, 0) if is_used else (1, 1))


def test_an_output_length_beats_the_answers_and_their_filter(words: Vocabulary, tmp_path: Path) -> None:
    made = workload(tmp_path, [entry(WORD * 5, WORD)], words, sharegpt_output_len=2, num_prompts=1)
    assert lengths(made) == [(5, 2)]


def test_a_short_file_is_repeated_or_sent_as_it_is(words: Vocabulary, tmp_path: Path) -> None:
    entries = [entry(WORD * 5, WORD * 5), entry(WORD * 6, WORD * 6)]
    made = workload(tmp_path, entries, words, num_prompts=40)
    assert lengths(made)[:2] == [(5, 5), (6, 6)]
    assert (len(made.conversations), set(lengths(made)[2:])) == (40, {(5, 5), (6, 6)})
    assert (made.facts["num_entries_used"], made.facts["num_requests"]) == (2, 40)
    assert len(workload(tmp_path, entries, words, num_prompts=40, no_oversample=True).conversations) == 2


def test_entries_are_shuffled_by_the_seed(words: Vocabulary, tmp_path: Path) -> None:
    entries = [entry(WORD * n, WORD * 5) for n in range(5, 35)]
    in_order = lengths(workload(tmp_path, entries, words, num_prompts=30))
    shuffled = lengths(workload(tmp_path, entries, words, num_prompts=30, disable_shuffle=False))
    other = lengths(workload(tmp_path, entries, words, num_prompts=30, disable_shuffle=False, seed=1))
    assert sorted(shuffled) == sorted(other) == in_order
    assert in_order != shuffled != other != in_order


GOOD = entry("a b c d", "e f g h")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("[{", "talks.json: it is not JSON"),
        ("[" * 100_000, "talks.json: it is not JSON"),
        ({"conversations": []}, "talks.json: expected a list of conversations"),
        ([GOOD, "text"], "talks.json, entry 2: expected an object, found 'text'"),
        ([GOOD, {}], "talks.json, entry 2: 'conversations' is missing"),
        ([GOOD, {"conversations": 5}], "talks.json, entry 2: 'conversations' is not a list"),
        ([GOOD, {"conversations": [1, 2]}], "talks.json, entry 2: expected an object, found 1"),
        ([GOOD, {"conversations": [{}, {}]}], "talks.json, entry 2: 'value' is missing"),
        ([GOOD, {"conversations": [{"value": 7}] * 2}], "talks.json, entry 2: 'value' is 7, not a text"),
        ([entry("\ud800", "e f g h")], "talks.json, entry 1: the text has a lone surrogate"),
        ([], "no entry has two messages of a length that can be used"),
        ([entry("a", "b")], "no entry has two messages of a length that can be used"),
    ],
)
def test_a_damaged_file_is_an_error_that_says_where(
    entries: Any, message: str, words: Vocabulary, tmp_path: Path
) -> None:
    with pytest.raises(InvalidSetting, match=message):
        workload(tmp_path, entries, words)


def test_a_file_that_is_no_text_is_an_error(words: Vocabulary, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe[]")
    with pytest.raises(InvalidSetting, match=r"--dataset-path .*binary: .*decode"):
        make(DatasetSettings(dataset_name="sharegpt", dataset_path=str(tmp_path / "binary")), words)


def test_an_output_length_that_cannot_be_is_named(words: Vocabulary, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="--sharegpt-output-len 0 is not at least 1"):
        workload(tmp_path, [GOOD], words, sharegpt_output_len=0)
