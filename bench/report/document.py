"""A report before it is HTML or Markdown: sections of tables and pictures. Knows neither results nor any markup."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from bench.facts import Facts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Tone = Literal["plain", "good", "bad", "muted", "head"]
"""What a cell says at a glance: a verdict for or against, something that says little, the name of its row."""


@dataclass(frozen=True, slots=True)
class Cell:
    """`detail` is a range or remark, smaller than `text`."""

    text: str
    detail: str = ""
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Table:
    """`name` is how a list of contents chooses it; columns named in `words` are set left, others are numbers."""

    name: str
    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    words: frozenset[str] = frozenset()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """`draw` is called when the picture is needed, which imports matplotlib."""

    name: str
    title: str
    draw: Callable[[], Figure]


@dataclass(frozen=True, slots=True)
class Card:
    """A figure large enough to be read first, and lines under it."""

    name: str
    value: str
    unit: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """What one result file has to say. `conditions` are names and texts that belong beside every figure."""

    name: str
    kind: str
    title: str
    facts: Facts
    conditions: tuple[tuple[str, str], ...]
    blocks: tuple[Table | Picture, ...]
    cards: tuple[Card, ...] = ()
    notes: tuple[str, ...] = ()


def words(text: str, detail: str = "") -> Cell:
    """The name of a row."""
    return Cell(text, detail, "head")


def plain(*texts: str) -> tuple[Cell, ...]:
    """Cells that only have a text."""
    return tuple(Cell(text) for text in texts)
