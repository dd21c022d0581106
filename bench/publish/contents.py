"""The list of what is published: `contents.yaml` beside the results. Knows no result and no markup.

- title: Against vLLM on the same cores
  file: pd.json                    # a result file; a section may also be prose alone
  intro: pd-intro.md               # prose before the tables
  notes: pd.md                     # prose after them
  tables: [figures, breakdown]     # by their names; all when left out
  pictures: [attainment, latency]  # by their names; none when left out
  html: pd.html                    # also write a report into the folder of documents
  blocks: [64, 512]                # of `bench kv`: sizes in the tables, all when left out
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from wire.errors import InvalidSetting


@dataclass(frozen=True, slots=True)
class Entry:
    """One section. `tables` and `blocks` are None for all; texts are "" where there is none."""

    title: str
    file: str = ""
    intro: str = ""
    notes: str = ""
    html: str = ""
    tables: tuple[str, ...] | None = None
    pictures: tuple[str, ...] = ()
    blocks: tuple[int, ...] | None = None


_TEXTS = ("title", "file", "intro", "notes", "html")
_LISTS: dict[str, type] = {"tables": str, "pictures": str, "blocks": int}


def read_contents(path: Path) -> list[Entry]:
    """Entries in the order of the page. Raises `InvalidSetting`."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidSetting(f"{path}: {error}") from None
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise InvalidSetting(f"{path}: expected a list of sections")
    return [_entry(path, number, entry) for number, entry in enumerate(content, start=1)]


def _entry(path: Path, number: int, found: dict[Any, Any]) -> Entry:
    place = f"{path}, section {number}"
    for key, value in found.items():
        if key in _TEXTS:
            is_right = isinstance(value, str)
        elif key in _LISTS:
            is_right = isinstance(value, list) and all(isinstance(item, _LISTS[key]) for item in value)
        else:
            raise InvalidSetting(f"{place}: unknown key {key!r}")
        if not is_right:
            raise InvalidSetting(f"{place}: {key} is not {'text' if key in _TEXTS else 'a list'}")
    if not found.get("title") or not (found.get("file") or found.get("notes")):
        raise InvalidSetting(f"{place}: a section needs a title, and a file or notes")
    values: dict[str, Any] = {key: tuple(value) if key in _LISTS else value for key, value in found.items()}
    return Entry(**values)
