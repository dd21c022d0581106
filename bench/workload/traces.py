"""Datasets `mooncake` and `azure`: the lengths and times of real requests, with random words in place of their text.

Owns dividing lengths and what a result has to say about a trace. A trace gives the rows that it has, in its order, and
never one twice. Its times are kept as they are; what becomes of them is decided by `arrivals.from_trace`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.workload.dataset_settings import DatasetSettings, check_count
from bench.workload.files import DataFile, read_data_file
from bench.workload.passages import Passage, draw_ids, exact, first_turn, fitted, num_after_opening
from bench.workload.prefix_blocks import prompt_ids, reuse_share, runs_of_blocks
from bench.workload.seeds import generator
from bench.workload.trace_rows import HASH_BLOCK_TOKENS, TraceRow, azure_rows, mooncake_rows
from bench.workload.turns import Conversation
from bench.workload.vocabulary import Vocabulary
from bench.workload.workload import Workload, described
from wire.errors import InvalidSetting

MOONCAKE_SAMPLE = "mooncake_conversation_2000.jsonl"
AZURE_SAMPLE = "azure2023_conv_2000.csv"


def make_mooncake(settings: DatasetSettings, vocabulary: Vocabulary) -> Workload:
    """Up to `num_prompts` rows of a Mooncake trace; its block ids are real shared prefixes. Raises `InvalidSetting`."""
    divisor = settings.length_divisor
    check_count(divisor, "--length-divisor", 1)
    if HASH_BLOCK_TOKENS % divisor:
        raise InvalidSetting(
            f"--length-divisor {divisor} does not divide {HASH_BLOCK_TOKENS}, the tokens of a block of this trace"
        )
    file = read_data_file(settings, MOONCAKE_SAMPLE)
    rows = mooncake_rows(file)
    used = rows[: settings.num_prompts]
    block_ids = [row.block_ids for row in used]
    num_block_tokens = HASH_BLOCK_TOKENS // divisor
    runs = runs_of_blocks(block_ids, num_block_tokens, vocabulary, settings.seed)
    passages = []
    for row in used:
        num = _divided(row.num_input, divisor)
        # the opening takes the place of the first tokens, so that blocks stay where they are
        token_ids = prompt_ids(row.block_ids, runs, num)[-num_after_opening(vocabulary, num) :]
        passages.append(exact(vocabulary, token_ids))
    facts = {"block_tokens": num_block_tokens, "reuse_share": round(reuse_share(block_ids), 6) if used else None}
    return _replay(settings, vocabulary, file, rows, passages, facts)


def make_azure(settings: DatasetSettings, vocabulary: Vocabulary) -> Workload:
    """Up to `num_prompts` rows of an Azure trace, which knows of no shared prefixes. Raises `InvalidSetting`."""
    check_count(settings.length_divisor, "--length-divisor", 1)
    file = read_data_file(settings, AZURE_SAMPLE)
    rows = azure_rows(file)
    random = generator(settings.seed, "prompts")
    passages = []
    for row in rows[: settings.num_prompts]:
        num = num_after_opening(vocabulary, _divided(row.num_input, settings.length_divisor))
        passages.append(fitted(vocabulary, draw_ids(vocabulary, num, random), random))
    return _replay(settings, vocabulary, file, rows, passages, {"block_tokens": None, "reuse_share": None})


def _replay(
    settings: DatasetSettings,
    vocabulary: Vocabulary,
    file: DataFile,
    rows: Sequence[TraceRow],
    passages: Sequence[Passage],
    facts: dict[str, Any],
) -> Workload:
    """`passages`: the prompts of the first rows."""
    if not rows:
        raise InvalidSetting(f"--dataset-path {file.path}: it has no rows")
    conversations = [
        Conversation(
            (first_turn(vocabulary, passage, _divided(row.num_output, settings.length_divisor)),),
            arrival_s=row.arrival_s,
        )
        for row, passage in zip(rows, passages, strict=False)
    ]
    of_trace = {
        **file.facts,
        "num_rows": len(rows),
        "num_rows_used": len(passages),
        "length_divisor": settings.length_divisor,
        "time_scale": settings.time_scale,
        "spread_timestamps": settings.spread_timestamps,
    }
    return described(settings, conversations, passages, {**of_trace, **facts})


def _divided(length: int, divisor: int) -> int:
    """Rounded up."""
    return -(-length // divisor)
