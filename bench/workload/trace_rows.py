"""Rows of published request traces: lengths and times, in Mooncake's JSON Lines and in Azure's CSV.

Owns the two formats; knows no tokens. A damaged row is an `InvalidSetting` that says where it is.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bench.workload.dataset_settings import MAX_TOKENS
from bench.workload.files import DataFile, field_of, json_lines, num_tokens_in, number_in
from wire.errors import InvalidSetting

HASH_BLOCK_TOKENS = 512
"""Tokens of the prompt that one of Mooncake's `hash_ids` stands for."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. `arrival_s` from the beginning of the trace; equal `block_ids` are equal prefixes up to there."""

    arrival_s: float
    num_input: int
    num_output: int
    block_ids: tuple[int, ...] = ()


def mooncake_rows(file: DataFile) -> list[TraceRow]:
    """Rows of `{"timestamp": ms, "input_length", "output_length", "hash_ids"}`. Raises `InvalidSetting`."""
    return [
        TraceRow(
            arrival_s=number_in(row, "timestamp", where) / 1000,
            num_input=num_tokens_in(row, "input_length", where),
            num_output=num_tokens_in(row, "output_length", where),
            block_ids=_block_ids(row, where),
        )
        for where, row in json_lines(file)
    ]


def azure_rows(file: DataFile) -> list[TraceRow]:
    """Rows of `TIMESTAMP,ContextTokens,GeneratedTokens`. Raises `InvalidSetting`."""
    reader = csv.DictReader(io.StringIO(file.text, newline=""))
    rows: list[TraceRow] = []
    begin: datetime | None = None
    try:
        for row in reader:
            where = f"{file.path}, line {reader.line_num}"
            time = _time(row, where)
            begin = begin or time
            rows.append(
                TraceRow(
                    arrival_s=_seconds_between(begin, time, where),
                    num_input=_num_tokens(row, "ContextTokens", where),
                    num_output=_num_tokens(row, "GeneratedTokens", where),
                )
            )
    except csv.Error as error:
        raise InvalidSetting(f"{file.path}, line {reader.line_num + 1}: it is not CSV: {error}") from None
    return rows


def _block_ids(row: Mapping[str, Any], where: str) -> tuple[int, ...]:
    found = field_of(row, "hash_ids", where)
    if not isinstance(found, list) or not all(isinstance(item, int) and not isinstance(item, bool) for item in found):
        raise InvalidSetting(f"{where}: 'hash_ids' is not a list of whole numbers")
    num_blocks = math.ceil(row["input_length"] / HASH_BLOCK_TOKENS)
    if len(found) != num_blocks:
        raise InvalidSetting(
            f"{where}: {len(found)} hash_ids for {row['input_length']} tokens, not one for each {HASH_BLOCK_TOKENS}"
        )
    return tuple(found)


def _num_tokens(row: Mapping[str, Any], name: str, where: str) -> int:
    text = field_of(row, name, where)
    is_number = isinstance(text, str) and text.isascii() and text.isdigit() and len(text) <= len(str(MAX_TOKENS))
    return num_tokens_in({name: int(text) if is_number else text}, name, where)


def _time(row: Mapping[str, Any], where: str) -> datetime:
    text = field_of(row, "TIMESTAMP", where)
    try:
        return datetime.fromisoformat(text)  # takes any number of fraction digits, and keeps six
    except (TypeError, ValueError):
        raise InvalidSetting(f"{where}: 'TIMESTAMP' is {text!r:.60}, not a time") from None


def _seconds_between(begin: datetime, time: datetime, where: str) -> float:
    try:
        return (time - begin).total_seconds()
    except TypeError:
        raise InvalidSetting(f"{where}: some times have a zone and some have none") from None
