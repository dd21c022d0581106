"""Datasets of a file, read whole and named by its hash: prompts as people have them, and the requests of a trace.

Every mistake in a file is an `InvalidSetting` that says where it is. Prompts are sent as they are: a chat template is
the server's business, at its chat endpoint. As in `vllm bench serve`, entries are shuffled, `--custom-output-len` beats
the `output_tokens` of a custom file unless it is -1, and of a ShareGPT file those entries are used that have at least
two messages whose lengths (with what a server adds to a text) are neither tiny nor beyond its limits: the first message
is the prompt, the second says how long the answer is.

A trace (Mooncake's JSON Lines, Azure's CSV) has the lengths and times of real requests, with random words in place of
their text. It gives the rows that it has, in its order, and never one twice. Its times are kept as they are; what
becomes of them is decided by `arrivals.from_trace`. Mooncake's block ids become tokens: equal ids equal runs, so that a
prefix cache finds what the trace had.
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
from typing import Annotated, Any, TypeAlias, TypeVar

import numpy as np
from pydantic import Field

from baton.bench.arguments import checked, parse_json
from baton.bench.workload.dataset_settings import (
    MAX_TOKENS,
    OUTPUT_LEN_OF_FILE,
    Conversation,
    DatasetSettings,
    Turn,
    Workload,
)
from baton.bench.workload.passages import (
    Passage,
    Vocabulary,
    described,
    draw_ids,
    drawn,
    exact,
    first_turn,
    generator,
    num_after_opening,
)
from baton.wire.errors import InvalidRequest, InvalidSetting

_T = TypeVar("_T")
TRACES = Path(__file__).resolve().parents[1] / "traces"
NumTokens: TypeAlias = Annotated[int, Field(strict=True, ge=1, le=MAX_TOKENS)]
_MIN_TOKENS = 4
_MAX_PROMPT_TOKENS = 1024
_MAX_TOTAL_TOKENS = 2048
MOONCAKE_SAMPLE = "mooncake_conversation_2000.jsonl"
AZURE_SAMPLE = "azure2023_conv_2000.csv"
HASH_BLOCK_TOKENS = 512
"""Tokens of the prompt that one of Mooncake's `hash_ids` stands for."""
_MAX_TRIES = 100


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


@dataclass(frozen=True, slots=True)
class _Message:
    value: str


@dataclass(frozen=True, slots=True)
class _Entry:
    conversations: list[_Message]


@dataclass(frozen=True, slots=True)
class _CustomRow:
    prompt: Annotated[str, Field(min_length=1)]
    output_tokens: Any = None


def read_data_file(settings: DatasetSettings, bundled: str = "") -> DataFile:
    """The file of `--dataset-path`; without a path the sample trace `bundled`. Raises `InvalidSetting`."""
    given = settings.dataset_path
    if not given and not bundled:
        raise InvalidSetting(f"--dataset-name {settings.dataset_name} needs a file: give it with --dataset-path")
    try:
        content = (Path(given) if given else TRACES / bundled).read_bytes()
        text = content.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise InvalidSetting(f"--dataset-path {given or bundled}: {error}") from None
    return DataFile(given or f"bench/traces/{bundled}", hashlib.sha256(content).hexdigest(), text)


def make_sharegpt(settings: DatasetSettings, vocabulary: Vocabulary) -> Workload:
    """`num_prompts` conversations of one turn, some twice where the file has fewer. Raises `InvalidSetting`."""
    file = _text_file(settings, vocabulary)
    entries = checked(list[_Entry], parse_json(file.text, file.path), file.path)
    pairs = [(place, entry.conversations) for place, entry in enumerate(entries, 1) if len(entry.conversations) > 1]
    turns: list[Turn] = []
    num_filtered = 0
    for place, (prompt, answer, *_) in _shuffled(settings, pairs):
        if len(turns) == settings.num_prompts:
            break
        where = f"{file.path}, entry {place}"
        num_output = settings.sharegpt_output_len
        if num_output is None:
            num_output = len(vocabulary.opening_ids) + len(_passage(vocabulary, answer.value, where).token_ids)
        turn = first_turn(vocabulary, _passage(vocabulary, prompt.value, where), num_output)
        if _is_fit(turn, settings):
            turns.append(turn)
        else:
            num_filtered += 1
    if not turns:
        raise InvalidSetting(f"--dataset-path {file.path}: no entry has two messages of a length that can be used")
    return _of_entries(settings, turns, file, {"num_entries_filtered": num_filtered})


def make_custom(settings: DatasetSettings, vocabulary: Vocabulary) -> Workload:
    """`num_prompts` conversations of one turn, some twice where the file has fewer. Raises `InvalidSetting`."""
    num_output = settings.custom_output_len
    if not num_output:
        raise InvalidSetting(f"--custom-output-len 0 is neither above 0 nor {OUTPUT_LEN_OF_FILE}")
    file = _text_file(settings, vocabulary)
    rows = [(where, checked(_CustomRow, row, where)) for where, row in file.json_lines()]
    if not rows:
        raise InvalidSetting(f"--dataset-path {file.path}: it has no prompts")
    turns = []
    for where, row in _shuffled(settings, rows)[: settings.num_prompts]:
        if settings.custom_output_len == OUTPUT_LEN_OF_FILE:
            num_output = checked(NumTokens, row.output_tokens, f"{where}: output_tokens")
        turns.append(first_turn(vocabulary, _passage(vocabulary, row.prompt, where), num_output))
    return _of_entries(settings, turns, file, {})


def _text_file(settings: DatasetSettings, vocabulary: Vocabulary) -> DataFile:
    if not vocabulary.has_text:
        name = settings.dataset_name
        raise InvalidSetting(f"--dataset-name {name} needs a tokenizer: name its folder with --tokenizer")
    return read_data_file(settings)


def _passage(vocabulary: Vocabulary, text: str, where: str) -> Passage:
    try:
        return Passage(vocabulary.ids_of(text), text)
    except InvalidRequest as error:
        raise InvalidSetting(f"{where}: {error}") from None


def _is_fit(turn: Turn, settings: DatasetSettings) -> bool:
    num_prompt, num_output = len(turn.token_ids), turn.num_output_tokens
    is_answer_fit = settings.sharegpt_output_len is not None or num_output >= _MIN_TOKENS
    is_short = num_prompt <= _MAX_PROMPT_TOKENS and num_prompt + num_output <= _MAX_TOTAL_TOKENS
    return num_prompt >= _MIN_TOKENS and is_answer_fit and is_short


def _shuffled(settings: DatasetSettings, entries: Sequence[_T]) -> Sequence[_T]:
    """In which order entries of a file are taken."""
    if settings.disable_shuffle:
        return entries
    return [entries[index] for index in generator(settings.seed, "order").permutation(len(entries)).tolist()]


def _of_entries(settings: DatasetSettings, turns: Sequence[Turn], file: DataFile, facts: dict[str, Any]) -> Workload:
    """Conversations of `turns`, and as many drawn again as are missing, unless `--no-oversample`."""
    num_missing = 0 if settings.no_oversample else max(settings.num_prompts - len(turns), 0)
    again = generator(settings.seed, "repetition").integers(0, len(turns), size=num_missing).tolist()
    conversations = [Conversation((turn,)) for turn in (*turns, *(turns[index] for index in again))]
    return described(settings, conversations, [], {**file.facts, "num_entries_used": len(turns), **facts})


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
        passages.append(exact(vocabulary, token_ids[-num_after_opening(vocabulary, num) :]))
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
        passages.append(drawn(vocabulary, num, random))
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
    redraw = generator(seed, "blocks drawn again")
    runs: dict[tuple[int, ...], int] = {}
    for block_id, row in zip(order, indices, strict=True):
        run = tuple(choice[index] for index in row.tolist())
        tries = chain([run], (draw_ids(vocabulary, num_tokens, redraw) for _ in range(_MAX_TRIES)))
        unused = next((run for run in tries if run not in runs), None)
        if unused is None:
            raise InvalidSetting(
                f"--length-divisor leaves a block length of {num_tokens}, too short for {len(order)} different blocks "
                f"of {len(choice)} tokens"
            )
        runs[unused] = block_id
    return {block_id: run for run, block_id in runs.items()}


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
        Conversation((first_turn(vocabulary, passage, -(-row.num_output // divisor)),), row.arrival_s)
        for row, passage in zip(rows, passages, strict=False)
    ]
    of_trace = {
        **file.facts,
        "num_rows": len(rows),
        "num_rows_used": len(passages),
        "length_divisor": divisor,
        "time_scale": settings.time_scale,
    }
    return described(settings, conversations, passages, {**of_trace, **facts})
