"""Files of datasets, as people have them: read whole, named by their hash, checked field by field.

Every mistake in them is an `InvalidSetting` that says where it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.workload.dataset_settings import MAX_TOKENS, DatasetSettings
from wire.errors import InvalidSetting

_MAX_NUMBER = 10**15
TRACES = Path(__file__).resolve().parents[1] / "traces"


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


def json_lines(file: DataFile) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where it is, object) for each line that is not empty. Raises `InvalidSetting`."""
    for number, line in enumerate(file.text.split("\n"), start=1):
        if line.strip():
            where = f"{file.path}, line {number}"
            yield where, as_object(parse_json(line, where), where)


def parse_json(text: str, where: str) -> Any:
    """Raises `InvalidSetting`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidSetting(f"{where}: it is not JSON: {error}") from None


def as_object(value: Any, where: str) -> Mapping[str, Any]:
    """Raises `InvalidSetting`."""
    if not isinstance(value, dict):
        raise InvalidSetting(f"{where}: expected an object, found {value!r:.60}")
    return value


def field_of(row: Mapping[str, Any], name: str, where: str) -> Any:
    """Raises `InvalidSetting`."""
    if name not in row:
        raise InvalidSetting(f"{where}: {name!r} is missing")
    return row[name]


def num_tokens_in(row: Mapping[str, Any], name: str, where: str) -> int:
    """A number of tokens, at least 1. Raises `InvalidSetting`."""
    value = field_of(row, name, where)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_TOKENS:
        raise InvalidSetting(f"{where}: {name!r} is {value!r:.60}, not a whole number from 1 to {MAX_TOKENS}")
    return value


def number_in(row: Mapping[str, Any], name: str, where: str) -> float:
    """A number, at least 0. Raises `InvalidSetting`."""
    value = field_of(row, name, where)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _MAX_NUMBER:
        raise InvalidSetting(f"{where}: {name!r} is {value!r:.60}, not a number from 0 to {_MAX_NUMBER}")
    return float(value)


def text_in(row: Mapping[str, Any], name: str, where: str) -> str:
    """Raises `InvalidSetting`."""
    value = field_of(row, name, where)
    if not isinstance(value, str):
        raise InvalidSetting(f"{where}: {name!r} is {value!r:.60}, not a text")
    return value
