"""Tables for a terminal that are Markdown, too: columns are aligned, the first to the left and numbers to the right."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table; a column is one of numbers when every cell of it is one."""
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    is_number = [bool(rows) and all(_is_number(row[column]) for row in rows) for column in range(len(heads))]
    lines = []
    for cells in (heads, *rows):
        placed = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, is_number, strict=True)
        ]
        lines.append(f"| {' | '.join(placed)} |")
    rule = [("-" * (width - 1) + ":") if right else "-" * width for width, right in zip(widths, is_number, strict=True)]
    return "\n".join([lines[0], f"| {' | '.join(rule)} |", *lines[1:]])


def figure(value: float | None) -> str:
    """Three significant digits at least, "-" for nothing."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit() or cell in ("-", "none")
