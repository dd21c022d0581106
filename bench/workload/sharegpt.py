"""Dataset `sharegpt`: the first message of each conversation of a ShareGPT file, its second for the answer's length.

Which entries are used is decided as in `vllm bench serve`: those of at least two messages, in shuffled order, whose
lengths (with what a server adds to a text) are neither tiny nor beyond its limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.workload.dataset_settings import DatasetSettings, check_count
from bench.workload.file_prompts import check_has_text, file_order, passage_of, repeated
from bench.workload.files import DataFile, as_object, field_of, parse_json, read_data_file, text_in
from bench.workload.passages import first_turn
from bench.workload.turns import Conversation, Turn
from bench.workload.vocabulary import Vocabulary
from bench.workload.workload import Workload, described
from wire.errors import InvalidSetting

_MIN_TOKENS = 4
_MAX_PROMPT_TOKENS = 1024
_MAX_TOTAL_TOKENS = 2048


def make(settings: DatasetSettings, vocabulary: Vocabulary) -> Workload:
    """`num_prompts` conversations of one turn, some twice where the file has fewer. Raises `InvalidSetting`."""
    check_has_text(settings, vocabulary)
    if settings.sharegpt_output_len is not None:
        check_count(settings.sharegpt_output_len, "--sharegpt-output-len", 1)
    file = read_data_file(settings)
    pairs = _pairs(file)
    conversations: list[Conversation] = []
    num_filtered = 0
    for index in file_order(settings, len(pairs)):
        if len(conversations) == settings.num_prompts:
            break
        turn = _turn(*pairs[index], settings, vocabulary)
        if _is_fit(turn, settings):
            conversations.append(Conversation((turn,)))
        else:
            num_filtered += 1
    if not conversations:
        raise InvalidSetting(f"--dataset-path {file.path}: no entry has two messages of a length that can be used")
    facts = {**file.facts, "num_entries_used": len(conversations), "num_entries_filtered": num_filtered}
    return described(settings, repeated(settings, conversations), [], facts)


def _pairs(file: DataFile) -> list[tuple[str, str, str]]:
    """(where it is, prompt, answer) of each entry with at least two messages."""
    entries = parse_json(file.text, file.path)
    if not isinstance(entries, list):
        raise InvalidSetting(f"{file.path}: expected a list of conversations, found {entries!r:.60}")
    pairs = []
    for number, entry in enumerate(entries, start=1):
        where = f"{file.path}, entry {number}"
        messages = field_of(as_object(entry, where), "conversations", where)
        if not isinstance(messages, list):
            raise InvalidSetting(f"{where}: 'conversations' is not a list")
        if len(messages) >= 2:
            prompt, answer = (_said(message, where) for message in messages[:2])
            pairs.append((where, prompt, answer))
    return pairs


def _said(message: Any, where: str) -> str:
    fields: Mapping[str, Any] = as_object(message, where)
    return text_in(fields, "value", where)


def _turn(where: str, prompt: str, answer: str, settings: DatasetSettings, vocabulary: Vocabulary) -> Turn:
    num_output = settings.sharegpt_output_len
    if num_output is None:
        num_output = len(vocabulary.opening_ids) + len(passage_of(vocabulary, answer, where).token_ids)
    return first_turn(vocabulary, passage_of(vocabulary, prompt, where), num_output)


def _is_fit(turn: Turn, settings: DatasetSettings) -> bool:
    num_prompt, num_output = len(turn.token_ids), turn.num_output_tokens
    is_answer_fit = settings.sharegpt_output_len is not None or num_output >= _MIN_TOKENS
    is_short = num_prompt <= _MAX_PROMPT_TOKENS and num_prompt + num_output <= _MAX_TOTAL_TOKENS
    return num_prompt >= _MIN_TOKENS and is_answer_fit and is_short
