"""The walk as docs/architecture.md tells it: the files of one request in the order in which they hand it on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
_ROW = re.compile(r"^\| (\d+) \| `([^`]+)` \| `([^`]+)` \|", re.M)


@dataclass(frozen=True, slots=True)
class Station:
    """A row of the table: a file, by its path in the repository, and the function in it to read first."""

    number: int
    source: str
    function: str


def stations() -> list[Station]:
    """All rows, in order."""
    text = _DOCUMENT.read_text()
    section = text[text.index("\n## One request through the house\n") :]
    return [Station(int(number), source, function) for number, source, function in _ROW.findall(section)]
