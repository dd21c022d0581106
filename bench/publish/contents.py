"""The list of what is published: `contents.yaml` beside the results. Knows no result and no markup.

opening: opening.md                  # prose for whoever decides whether to use this, before everything else
sections:
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

from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from bench.checked import checked, read_text
from wire.errors import InvalidSetting


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
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


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Contents:
    """The page: what stands before the sections, and these in their order."""

    sections: tuple[Entry, ...]
    opening: str = ""


def read_contents(path: Path) -> Contents:
    """Raises `InvalidSetting`."""
    try:
        content: Any = yaml.safe_load(read_text(path, str(path)))
    except yaml.YAMLError as error:
        raise InvalidSetting(f"{path}: {error}") from None
    contents = checked(Contents, content, str(path))
    for entry in contents.sections:
        if not entry.title or not (entry.file or entry.notes):
            raise InvalidSetting(f"{path}: {entry.title!r}: a section needs a title, and a file or notes")
    return contents
