"""Typed access to a decoded `config.json`: each error names file, field and value.

Owns types and ranges of single values; which fields there are is their readers' knowledge. Imports no torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.wire.errors import ModelLoadError

MAX_SIZE = 2**24
MAX_TOKENS = 2**40
"""Limits of what a file may say: of a dimension of a tensor, and of positions."""


class Fields:
    """Typed access to a decoded JSON object; each error names file, field and value. `renamed`: the usual name of each
    field that the file may call otherwise; errors say both."""

    def __init__(self, content: dict[str, Any], source: str, renamed: Mapping[str, str] | None = None) -> None:
        self._content = content
        self._source = source
        self._names_in_file = {usual: name for name, usual in (renamed or {}).items()}

    def error(self, name: str, expected: str) -> ModelLoadError:
        other = self._names_in_file.get(name)
        told = name if other is None else f"{other} ({name})"
        if name not in self._content:
            return ModelLoadError(f"{self._source}: {told} is missing, expected {expected}")
        return ModelLoadError(f"{self._source}: {told} must be {expected}, got {self._content[name]!r}")

    def has(self, name: str) -> bool:
        """Whether the field is there with a value; files write an explicit null for 'not set'."""
        return self._content.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Whether the field is there as an explicit null, which some fields tell from not being there."""
        return name in self._content and self._content[name] is None

    def raw(self, name: str) -> Any:
        return self._content.get(name)

    def count(self, name: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """A size from 1 to `most`. A size beyond any model's is refused here, before memory of that size is
        allocated."""
        value = self._content.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, "a positive integer")
        if value > most:
            raise self.error(name, f"at most {most}")
        return value

    def index(self, name: str, default: int) -> int:
        value = self._content.get(name, default)
        if not _is_natural(value):
            raise self.error(name, "an integer that is not negative")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._content.get(name)
        if value is None and default is not None:
            return default
        if not _is_positive(value):
            raise self.error(name, "a positive number")
        return float(value)  # type: ignore[arg-type]  # just asked

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """The numbers in a field, which has to be a list of `length` positive ones. Raises `ModelLoadError`."""
        value = self._content.get(name)
        if not isinstance(value, list) or len(value) != length or not all(map(_is_positive, value)):
            raise self.error(name, f"a list of {length} positive numbers")
        return tuple(float(item) for item in value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._content.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def dtype(self) -> str | None:
        """The dtype that the file names, under its new or its old field; `None` when it does not."""
        name = "dtype" if self.has("dtype") else "torch_dtype"
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.error(name, "the name of a dtype")
        return value.removeprefix("torch.")

    def token_ids(self, name: str) -> list[int]:
        """The ids in a field that holds one id, a list of ids, or null for none."""
        value = self._content.get(name)
        if value is None:
            return []
        ids = value if isinstance(value, list) else [value]
        if not all(_is_natural(token_id) for token_id in ids):
            raise self.error(name, "a token id or a list of token ids")
        return ids


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _is_natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file of a checkpoint. Raises `ModelLoadError`."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelLoadError(f"{path.parent}: not a checkpoint, it has no {path.name}") from None
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object, got {type(content).__name__}")
    return content
