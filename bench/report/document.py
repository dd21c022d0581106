"""A report before it is HTML or Markdown: sections of tables and pictures, and as text. Knows no result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from baton.bench.facts import Facts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Tone = Literal["plain", "good", "bad", "muted", "head"]
"""What a cell says at a glance: a verdict for or against, something that says little, the name of its row."""


_MOST_WORDS = 3
"""Of a cell that is a number: `0.58 to 0.66`, `18.4 GB/s`, `0 of 12`."""


@dataclass(frozen=True, slots=True)
class Cell:
    """`detail` is a range or remark, smaller than `text`."""

    text: str
    detail: str = ""
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Table:
    """`name` is how one is chosen; tables of several rates share it."""

    name: str
    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    @property
    def left(self) -> list[bool]:
        """Which columns are words and set left."""
        return are_words([[cell.text for cell in row] for row in self.rows])


@dataclass(frozen=True, slots=True)
class Picture:
    """`draw` is called when the picture is needed, which imports matplotlib."""

    name: str
    title: str
    draw: Callable[[], Figure]


@dataclass(frozen=True, slots=True)
class Section:
    """What one result file has to say. `conditions` are names and texts that belong beside every figure."""

    name: str
    kind: str
    title: str
    facts: Facts
    conditions: tuple[tuple[str, str], ...] = ()
    blocks: tuple[Table | Picture, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def tables(self) -> dict[str, list[Table]]:
        """By name; tables of several rates share one."""
        found: dict[str, list[Table]] = {}
        for block in self.blocks:
            if isinstance(block, Table):
                found.setdefault(block.name, []).append(block)
        return found

    @property
    def pictures(self) -> dict[str, Picture]:
        return {block.name: block for block in self.blocks if isinstance(block, Picture)}


def words(text: str, detail: str = "") -> Cell:
    return Cell(text, detail, "head")


def table_of(
    name: str, title: str, heads: Sequence[str], rows: Iterable[Sequence[Cell | str]], note: str = ""
) -> Table:
    """A table of cells and texts; the first of each row names it."""
    cells = ([cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows)
    return Table(name, title, tuple(heads), tuple((words(row[0].text, row[0].detail), *row[1:]) for row in cells), note)


def as_text(section: Section, *names: str) -> str:
    """Tables of these names and the notes, for a terminal: Markdown with aligned columns, numbers to the right."""
    tables = [table for name in names for table in section.tables.get(name, ())]
    notes = "\n".join(f"note: {note}" for note in section.notes)
    return "\n\n".join([f"**{section.title}**", *map(_table_as_text, tables), *([notes] if notes else [])])


def aligned(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown that can be read in a terminal: the first column and those of words to the left, numbers right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    left = are_words(rows)
    rule = ["-" * width if is_left else "-" * (width - 1) + ":" for width, is_left in zip(widths, left, strict=True)]
    shape = " | ".join(f"{{:{'<' if is_left else '>'}{width}}}" for width, is_left in zip(widths, left, strict=True))
    return "\n".join(f"| {shape.format(*row)} |" for row in (heads, rule, *rows))


def are_words(rows: Sequence[Sequence[str]]) -> list[bool]:
    """Of each column; one of numbers has nothing else, and the first names its row."""
    columns = enumerate(zip(*rows, strict=True))
    return [not place or not all(map(_is_number, column)) for place, column in columns]


def _is_number(cell: str) -> bool:
    """A figure, perhaps with a unit or a range; a sentence may begin with one, too."""
    is_short = len(cell.partition("(")[0].split()) <= _MOST_WORDS
    return (cell[:1].isdigit() and is_short) or cell in ("", "-", "none")


def _table_as_text(table: Table) -> str:
    rows = [[f"{cell.text} ({cell.detail})" if cell.detail else cell.text for cell in row] for row in table.rows]
    shown = [f"**{table.title}**", aligned(table.heads, rows), table.note]
    return "\n\n".join(filter(None, shown))
