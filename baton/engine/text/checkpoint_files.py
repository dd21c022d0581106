"""Reads the small text files of a checkpoint folder: JSON files and the names of its special tokens.

Owns the rules for which file wins. Knows nothing of tokenizing or templates. A file that is absent counts
as empty; a file that is there but cannot be understood is a `ModelLoadError` that names it, never a silent
default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.wire.errors import ModelLoadError

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"


def read_text(path: Path) -> str:
    """The file as text. Raises `ModelLoadError` when it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in `path`, empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return value


@dataclass(frozen=True)
class SpecialTokens:
    """The names of a checkpoint's special tokens: `named` ("bos_token" -> "<s>") and further ones without a name."""

    named: Mapping[str, str]
    extra: tuple[str, ...]

    @classmethod
    def from_folder(cls, folder: Path) -> SpecialTokens:
        """Read `tokenizer_config.json`; `special_tokens_map.json` counts only for older checkpoints, whose
        tokenizer config does not list its added tokens (the same order as in transformers)."""
        config = read_json(folder / TOKENIZER_CONFIG)
        if "added_tokens_decoder" not in config:
            config = {**config, **read_json(folder / SPECIAL_TOKENS_MAP)}
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        if isinstance(extra, dict):
            config, extra = {**config, **extra}, []
        named = {key: token_content(value) for key, value in config.items() if key.endswith("_token")}
        contents = [token_content(value) for value in extra] if isinstance(extra, list) else []
        return cls(
            named={key: content for key, content in named.items() if content is not None},
            extra=tuple(content for content in contents if content is not None),
        )


def token_content(value: object) -> str | None:
    """The text of a token written as a string or as an object with `content`; None for anything else (a
    flag, null)."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
