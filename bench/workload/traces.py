"""Datasets `mooncake` and `azure`: the lengths and times of real requests, with random words in place of their text.

Owns the two formats (Mooncake's JSON Lines, Azure's CSV), dividing lengths, and what a result has to say about a trace.
A trace gives the rows that it has, in its order, and never one twice. Its times are kept as they are; what becomes of
them is decided by `arrivals.from_trace`. A damaged row is an `InvalidSetting` that says where it is.

Mooncake's block ids become tokens: equal ids equal runs, so that a prefix cache finds what the trace had.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from bench.arguments import checked
from bench.workload.dataset_settings import MAX_TOKENS, DatasetSettings, check_counts
from bench.workload.files import DataFile, NumTokens, read_data_file
from bench.workload.passages import (
    Passage,
    Vocabulary,
    described,
    draw_ids,
    exact,
    first_turn,
    fitted,
    generator,
    num_after_opening,
)
from bench.workload.turns import Conversation, Workload
from wire.errors import InvalidSetting

MOONCAKE_SAMPLE = "mooncake_conversation_2000.jsonl"
AZURE_SAMPLE = "azure2023_conv_2000.csv"
HASH_BLOCK_TOKENS = 512
"""Tokens of the prompt that one of Mooncake's `hash_ids` stands for."""
_MAX_TRIES = 100


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. `arrival_s` from the beginning of the trace; equal `block_ids` are equal prefixes up to there."""

    arrival_s: float
    num_input: int
    num_output: int
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _MooncakeRow:
    timestamp: Annotated[float, Field(strict=True, ge=0, le=10**15)]
    input_length: NumTokens
    output_length: NumTokens
    hash_ids: tuple[Annotated[int, Field(strict=True)], ...]


@dataclass(frozen=True, slots=True)
class _AzureRow:
    TIMESTAMP: datetime
    ContextTokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    GeneratedTokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]


def make_mooncake(settings: DatasetSettings, vocabulary: Vocabulary) -> Workload:
    """Up to `num_prompts` rows of a Mooncake trace; its block ids are real shared prefixes. Raises `InvalidSetting`."""
    check_counts(settings, length_divisor=1)
    divisor = settings.length_divisor
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
        token_ids = tuple(chain.from_iterable(runs[block_id] for block_id in row.block_ids))[:num]
        # the opening takes the place of the first tokens, so that blocks stay where they are
        passages.append(exact(vocabulary, token_ids[-num_after_opening(vocabulary, num) :]))
    facts = {"block_tokens": num_block_tokens, "reuse_share": round(reuse_share(block_ids), 6) if used else None}
    return _replay(settings, vocabulary, file, rows, passages, facts)


def make_azure(settings: DatasetSettings, vocabulary: Vocabulary) -> Workload:
    """Up to `num_prompts` rows of an Azure trace, which knows of no shared prefixes. Raises `InvalidSetting`."""
    check_counts(settings, length_divisor=1)
    file = read_data_file(settings, AZURE_SAMPLE)
    rows = azure_rows(file)
    random = generator(settings.seed, "prompts")
    passages = []
    for row in rows[: settings.num_prompts]:
        num = num_after_opening(vocabulary, _divided(row.num_input, settings.length_divisor))
        passages.append(fitted(vocabulary, draw_ids(vocabulary, num, random), random))
    return _replay(settings, vocabulary, file, rows, passages, {"block_tokens": None, "reuse_share": None})


def mooncake_rows(file: DataFile) -> list[TraceRow]:
    """Rows of `{"timestamp": ms, "input_length", "output_length", "hash_ids"}`. Raises `InvalidSetting`."""
    rows = []
    for where, line in file.json_lines():
        row = checked(_MooncakeRow, line, where)
        num_blocks = math.ceil(row.input_length / HASH_BLOCK_TOKENS)
        if len(row.hash_ids) != num_blocks:
            raise InvalidSetting(
                f"{where}: {len(row.hash_ids)} hash_ids for {row.input_length} tokens, not one for each"
                f" {HASH_BLOCK_TOKENS}"
            )
        rows.append(TraceRow(row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids))
    return rows


def azure_rows(file: DataFile) -> list[TraceRow]:
    """Rows of `TIMESTAMP,ContextTokens,GeneratedTokens`. Raises `InvalidSetting`."""
    reader = csv.DictReader(io.StringIO(file.text, newline=""))
    rows: list[TraceRow] = []
    begin: datetime | None = None
    try:
        for line in reader:
            where = f"{file.path}, line {reader.line_num}"
            row = checked(_AzureRow, line, where)
            begin = begin or row.TIMESTAMP
            if (begin.tzinfo is None) != (row.TIMESTAMP.tzinfo is None):
                raise InvalidSetting(f"{where}: some times have a zone and some have none")
            arrival_s = (row.TIMESTAMP - begin).total_seconds()
            rows.append(TraceRow(arrival_s, row.ContextTokens, row.GeneratedTokens))
    except csv.Error as error:
        raise InvalidSetting(f"{file.path}, line {reader.line_num + 1}: it is not CSV: {error}") from None
    return rows


def runs_of_blocks(
    block_ids: Sequence[Sequence[int]], num_tokens: int, vocabulary: Vocabulary, seed: int
) -> dict[int, tuple[int, ...]]:
    """A run of `num_tokens` for each id of the prompts' `block_ids`, no two the same.

    A run depends on the seed and on where in the trace its id comes first, not on how many rows are used. Raises
    `InvalidSetting` when runs are too short for as many different ones as the trace has ids.
    """
    order = list(dict.fromkeys(chain.from_iterable(block_ids)))
    drawn = vocabulary.drawn_ids
    indices = generator(seed, "blocks").integers(0, len(drawn), size=(len(order), num_tokens), dtype=np.uint32)
    redraw = generator(seed, "blocks drawn again")
    runs: dict[int, tuple[int, ...]] = {}
    taken: set[tuple[int, ...]] = set()
    for block_id, row in zip(order, indices, strict=True):
        run = tuple(drawn[index] for index in row.tolist())
        for _ in range(_MAX_TRIES):
            if run not in taken:
                break
            run = draw_ids(vocabulary, num_tokens, redraw)
        else:
            raise InvalidSetting(
                f"--length-divisor leaves a block length of {num_tokens}, too short for {len(order)} different blocks "
                f"of {len(drawn)} tokens"
            )
        taken.add(run)
        runs[block_id] = run
    return runs


def reuse_share(block_ids: Iterable[Sequence[int]]) -> float:
    """Share of blocks that a cache without limit finds, prompts one after the other; only unbroken prefixes count."""
    seen: set[int] = set()
    num_found = num_blocks = 0
    for prompt in block_ids:
        num_found += next((index for index, block_id in enumerate(prompt) if block_id not in seen), len(prompt))
        num_blocks += len(prompt)
        seen.update(prompt)
    return num_found / num_blocks


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
    divisor = settings.length_divisor
    conversations = [
        Conversation((first_turn(vocabulary, passage, _divided(row.num_output, divisor)),), row.arrival_s)
        for row, passage in zip(rows, passages, strict=False)
    ]
    of_trace = {
        **file.facts,
        "num_rows": len(rows),
        "num_rows_used": len(passages),
        "length_divisor": divisor,
        "time_scale": settings.time_scale,
        "spread_timestamps": settings.spread_timestamps,
    }
    return described(settings, conversations, passages, {**of_trace, **facts})


def _divided(length: int, divisor: int) -> int:
    """Rounded up."""
    return -(-length // divisor)
