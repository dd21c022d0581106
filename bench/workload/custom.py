"""Dataset `custom`: prompts of a JSON Lines file, `{"prompt": "...", "output_tokens": 10}`.

As in `vllm bench serve`, `--custom-output-len` beats `output_tokens` unless it is -1, and lines are shuffled. Prompts
are sent as they are: a chat template is the server's business, at its chat endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.workload.dataset_settings import OUTPUT_LEN_OF_FILE, DatasetSettings, check_count
from bench.workload.file_prompts import check_has_text, file_order, passage_of, repeated
from bench.workload.files import json_lines, num_tokens_in, read_data_file, text_in
from bench.workload.passages import first_turn
from bench.workload.turns import Conversation
from bench.workload.vocabulary import Vocabulary
from bench.workload.workload import Workload, described
from wire.errors import InvalidSetting


def make(settings: DatasetSettings, vocabulary: Vocabulary) -> Workload:
    """`num_prompts` conversations of one turn, some twice where the file has fewer. Raises `InvalidSetting`."""
    check_has_text(settings, vocabulary)
    if settings.custom_output_len != OUTPUT_LEN_OF_FILE:
        check_count(settings.custom_output_len, "--custom-output-len", 1)
    file = read_data_file(settings)
    rows = [
        (where, text_in(row, "prompt", where), _num_output(row, where, settings)) for where, row in json_lines(file)
    ]
    if not rows:
        raise InvalidSetting(f"--dataset-path {file.path}: it has no prompts")
    conversations = []
    for index in file_order(settings, len(rows))[: settings.num_prompts]:
        where, prompt, num_output = rows[index]
        passage = passage_of(vocabulary, prompt, where)
        if not passage.token_ids:
            raise InvalidSetting(f"{where}: 'prompt' is empty")
        conversations.append(Conversation((first_turn(vocabulary, passage, num_output),)))
    facts = {**file.facts, "num_entries_used": len(conversations)}
    return described(settings, repeated(settings, conversations), [], facts)


def _num_output(row: Mapping[str, Any], where: str, settings: DatasetSettings) -> int:
    if settings.custom_output_len != OUTPUT_LEN_OF_FILE:
        return settings.custom_output_len
    return num_tokens_in(row, "output_tokens", where)
