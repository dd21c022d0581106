"""Sections as Markdown for people who read the repository. Text from files is escaped here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence

from bench.facts import Facts
from bench.report.document import Cell, Table

_LINE = 110


def table_lines(table: Table) -> Iterator[str]:
    """A title, the table, and its note."""
    yield f"**{escaped(table.title)}**"
    yield ""
    yield _row(escaped(head) for head in table.heads)
    yield _row("---" if head in table.words or not place else "---:" for place, head in enumerate(table.heads))
    for row in table.rows:
        yield _row(_cell(cell) for cell in row)
    yield ""
    if table.note:
        yield from (escaped(table.note), "")


def facts_lines(facts: Facts) -> Iterator[str]:
    """The command that makes the file again, and what it ran on."""
    yield from (f"    {line}" for line in command_lines(facts.command))
    yield ""
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    yield escaped(
        f"{facts.time}, commit {facts.commit or 'unknown'}. {facts.cpu_model or 'Unknown processor'}, "
        f"{facts.num_cores} cores (ran on {', '.join(map(str, facts.cores))}), {facts.memory_bytes / 2**30:.0f} GiB, "
        f"{facts.kernel}, load average before {facts.load_average:.2f}. {versions}."
    )
    yield ""


def command_lines(command: str) -> list[str]:
    """A command over several lines that a shell takes as one, each word in one piece."""
    try:
        words = [shlex.quote(word) for word in shlex.split(command)]
    except ValueError:
        words = command.split()
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) > _LINE:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*|\[\]])", r"\\\1", " ".join(text.split())).replace("<", "&lt;")


def notes_lines(notes: Sequence[str]) -> Iterator[str]:
    """Remarks that belong beside the figures, as a list."""
    yield from (f"- {escaped(note)}" for note in notes)
    if notes:
        yield ""


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell) -> str:
    return f"{escaped(cell.text)} ({escaped(cell.detail)})" if cell.detail else escaped(cell.text)
