"""The requests of a trace: a file that is read whole and named by its hash.

Every mistake in a file is an `InvalidSetting` that says where it is. A trace (Mooncake's JSON Lines, Azure's CSV) has
the lengths and times of real requests, with random words in place of their text. It gives the rows that it has, in its
order, and never one twice. Its times are kept as they are; what becomes of them is decided by `arrivals.from_trace`.
Mooncake's block ids become tokens: equal ids equal runs, so that a prefix cache finds what the trace had.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
from pydantic import Field

from baton.bench.arguments import checked, parse_json
from baton.bench.workload.dataset_settings import MAX_TOKENS, DatasetSettings, Workload
from baton.bench.workload.passages import Vocabulary, described, draw_ids, generator, num_after_opening, opened
from baton.wire.errors import InvalidSetting

TRACES = Path(__file__).resolve().parents[1] / "traces"
NumTokens: TypeAlias = Annotated[int, Field(strict=True, ge=1, le=MAX_TOKENS)]
MOONCAKE_SAMPLE = "mooncake_conversation_2000.jsonl"
AZURE_SAMPLE = "azure2023_conv_2000.csv"
HASH_BLOCK_TOKENS = 512
"""Tokens of the prompt that one of Mooncake's `hash_ids` stands for."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """`path` as it was given."""

    path: str
    sha256: str
    text: str

    @property
    def facts(self) -> dict[str, Any]:
        return {"path": self.path, "sha256": self.sha256}

    def json_lines(self) -> Iterator[tuple[str, Any]]:
        """(where it is, value) for each line that is not empty. Raises `InvalidSetting`."""
        for number, line in enumerate(self.text.split("\n"), start=1):
            if line.strip():
                where = f"{self.path}, line {number}"
                yield where, parse_json(line, where)


def read_data_file(settings: DatasetSettings, bundled: str) -> DataFile:
    """The file of `--dataset-path`; without a path the sample trace `bundled`. Raises `InvalidSetting`."""
    given = settings.dataset_path
    try:
        content = (Path(given) if given else TRACES / bundled).read_bytes()
        text = content.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise InvalidSetting(f"--dataset-path {given or bundled}: {error}") from None
    return DataFile(given or f"bench/traces/{bundled}", hashlib.sha256(content).hexdigest(), text)


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
    divisor = settings.length_divisor
    if HASH_BLOCK_TOKENS % divisor:
        raise InvalidSetting(
            f"--length-divisor {divisor} does not divide {HASH_BLOCK_TOKENS}, the tokens of a block of this trace"
        )
    file = read_data_file(settings, MOONCAKE_SAMPLE)
    rows = mooncake_rows(file)
    used = rows[: settings.num_prompts]
    block_ids = [row.block_ids for row in used]
    runs = runs_of_blocks(block_ids, HASH_BLOCK_TOKENS // divisor, vocabulary, settings.seed)
    passages = []
    for row in used:
        num = -(-row.num_input // divisor)
        token_ids = tuple(chain.from_iterable(runs[block_id] for block_id in row.block_ids))[:num]
        # the opening takes the place of the first tokens, so that blocks stay where they are
        passages.append(token_ids[-num_after_opening(vocabulary, num) :])
    share = round(reuse_share(block_ids), 6) if used else None
    facts = {"block_tokens": HASH_BLOCK_TOKENS // divisor, "reuse_share": share}
    return _replay(settings, vocabulary, file, rows, passages, facts)


def make_azure(settings: DatasetSettings, vocabulary: Vocabulary) -> Workload:
    """Up to `num_prompts` rows of an Azure trace, which knows of no shared prefixes. Raises `InvalidSetting`."""
    file = read_data_file(settings, AZURE_SAMPLE)
    rows = azure_rows(file)
    random = generator(settings.seed, "prompts")
    passages = []
    for row in rows[: settings.num_prompts]:
        num = num_after_opening(vocabulary, -(-row.num_input // settings.length_divisor))
        passages.append(draw_ids(vocabulary, num, random))
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
            row = checked(_AzureRow, line, f"{file.path}, line {reader.line_num}")
            begin = begin or row.TIMESTAMP
            arrival_s = (row.TIMESTAMP - begin).total_seconds()
            rows.append(TraceRow(arrival_s, row.ContextTokens, row.GeneratedTokens))
    except TypeError:
        where = f"{file.path}, line {reader.line_num}"
        raise InvalidSetting(f"{where}: some times have a zone and some have none") from None
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
    choice = vocabulary.drawn_ids
    indices = generator(seed, "blocks").integers(0, len(choice), size=(len(order), num_tokens), dtype=np.uint32)
    runs = {
        block_id: tuple(choice[index] for index in row.tolist()) for block_id, row in zip(order, indices, strict=True)
    }
    if len(set(runs.values())) < len(runs):
        raise InvalidSetting(
            f"--length-divisor leaves a block length of {num_tokens}, too short for {len(order)} different blocks "
            f"of {len(choice)} tokens"
        )
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
    passages: Sequence[tuple[int, ...]],
    facts: dict[str, Any],
) -> Workload:
    """`passages`: the ids of the first rows' prompts."""
    if not rows:
        raise InvalidSetting(f"--dataset-path {file.path}: it has no rows")
    divisor = settings.length_divisor
    prompts = [
        opened(vocabulary, passage, -(-row.num_output // divisor), row.arrival_s)
        for row, passage in zip(rows, passages, strict=False)
    ]
    of_trace = {
        **file.facts,
        "num_rows": len(rows),
        "num_rows_used": len(passages),
        "length_divisor": divisor,
        "time_scale": settings.time_scale,
    }
    return described(settings, prompts, {**of_trace, **facts})
