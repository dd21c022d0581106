"""Datasets `sharegpt` and `custom`: prompts of a file as people have them, read whole and named by its hash.

Every mistake in a file is an `InvalidSetting` that says where it is. Prompts are sent as they are: a chat template is
the server's business, at its chat endpoint. As in `vllm bench serve`, entries are shuffled, `--custom-output-len` beats
the `output_tokens` of a custom file unless it is -1, and of a ShareGPT file those entries are used that have at least
two messages whose lengths (with what a server adds to a text) are neither tiny nor beyond its limits: the first message
is the prompt, the second says how long the answer is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from bench.arguments import checked, parse_json
from bench.workload.dataset_settings import MAX_TOKENS, OUTPUT_LEN_OF_FILE, DatasetSettings, check_counts
from bench.workload.passages import Passage, Vocabulary, described, first_turn, generator
from bench.workload.turns import Conversation, Turn, Workload
from wire.errors import InvalidRequest, InvalidSetting

TRACES = Path(__file__).resolve().parents[1] / "traces"
NumTokens: TypeAlias = Annotated[int, Field(strict=True, ge=1, le=MAX_TOKENS)]
_MIN_TOKENS = 4
_MAX_PROMPT_TOKENS = 1024
_MAX_TOTAL_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class DataFile:
    """`path` as it was given."""

    path: str
    sha256: str
    text: str

    @property
    def facts(self) -> dict[str, Any]:
        """What a result says about the file."""
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
    prompt: str


@dataclass(frozen=True, slots=True)
class _CustomRowWithLength(_CustomRow):
    output_tokens: NumTokens


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
    check_counts(settings, sharegpt_output_len=1)
    file = _text_file(settings, vocabulary)
    entries = checked(list[_Entry], parse_json(file.text, file.path), file.path)
    pairs = [(place, entry.conversations) for place, entry in enumerate(entries, 1) if len(entry.conversations) > 1]
    conversations: list[Conversation] = []
    num_filtered = 0
    for index in _order(settings, len(pairs)):
        if len(conversations) == settings.num_prompts:
            break
        place, (prompt, answer, *_) = pairs[index]
        where = f"{file.path}, entry {place}"
        num_output = settings.sharegpt_output_len
        if num_output is None:
            num_output = len(vocabulary.opening_ids) + len(_passage(vocabulary, answer.value, where).token_ids)
        turn = first_turn(vocabulary, _passage(vocabulary, prompt.value, where), num_output)
        if _is_fit(turn, settings):
            conversations.append(Conversation((turn,)))
        else:
            num_filtered += 1
    if not conversations:
        raise InvalidSetting(f"--dataset-path {file.path}: no entry has two messages of a length that can be used")
    facts = {**file.facts, "num_entries_used": len(conversations), "num_entries_filtered": num_filtered}
    return described(settings, _repeated(settings, conversations), [], facts)


def make_custom(settings: DatasetSettings, vocabulary: Vocabulary) -> Workload:
    """`num_prompts` conversations of one turn, some twice where the file has fewer. Raises `InvalidSetting`."""
    is_of_file = settings.custom_output_len == OUTPUT_LEN_OF_FILE
    if not is_of_file:
        check_counts(settings, custom_output_len=1)
    file = _text_file(settings, vocabulary)
    kind: type[_CustomRow] = _CustomRowWithLength if is_of_file else _CustomRow
    rows = [(where, checked(kind, row, where)) for where, row in file.json_lines()]
    if not rows:
        raise InvalidSetting(f"--dataset-path {file.path}: it has no prompts")
    conversations = []
    for index in _order(settings, len(rows))[: settings.num_prompts]:
        where, row = rows[index]
        passage = _passage(vocabulary, row.prompt, where)
        if not passage.token_ids:
            raise InvalidSetting(f"{where}: 'prompt' is empty")
        num_output = row.output_tokens if isinstance(row, _CustomRowWithLength) else settings.custom_output_len
        conversations.append(Conversation((first_turn(vocabulary, passage, num_output),)))
    facts = {**file.facts, "num_entries_used": len(conversations)}
    return described(settings, _repeated(settings, conversations), [], facts)


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


def _order(settings: DatasetSettings, num: int) -> list[int]:
    """In which `num` entries of a file are taken: shuffled unless `--disable-shuffle`."""
    if settings.disable_shuffle:
        return list(range(num))
    return [int(index) for index in generator(settings.seed, "order").permutation(num)]


def _repeated(settings: DatasetSettings, conversations: Sequence[Conversation]) -> list[Conversation]:
    """`conversations`, and as many drawn from them again as are missing, unless `--no-oversample`."""
    num_missing = max(settings.num_prompts - len(conversations), 0)
    if settings.no_oversample or not num_missing:
        return list(conversations)
    chosen = generator(settings.seed, "repetition").integers(0, len(conversations), size=num_missing)
    return [*conversations, *(conversations[int(index)] for index in chosen)]
