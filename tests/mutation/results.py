"""What became of mutants: a file of JSON lines that a later run goes on with, the accepted ones, and the summary.

A mutant is named by its file and its lines before and after the change, so that it keeps its name when lines around it
change. `equivalent.yaml` lists the mutants that no test can see, each with its reason; they count neither as killed nor
as alive. One that is listed and was killed is told, since its reason is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path

import yaml

_EQUIVALENT = Path(__file__).with_name("equivalent.yaml")
_Z = 1.96
"""Of a 95 % confidence interval."""


@dataclass(frozen=True, slots=True)
class Row:
    """A mutant of an area, and what became of it. See `tests.mutation.trial.Verdict`."""

    area: str
    file: str
    line: int
    operator: str
    before: str
    after: str
    outcome: str
    test: str = ""
    num_tests: int = 0
    seconds: float = 0.0

    @property
    def name(self) -> tuple[str, str, str]:
        """Which mutant it is."""
        return self.file, self.before, self.after

    def __str__(self) -> str:
        return (
            f"{self.file}:{self.line} {self.operator} ({self.num_tests} tests)\n    - {self.before}\n    + {self.after}"
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """Of an area: how many mutants were tried, and what became of them."""

    num_killed: int
    num_timeouts: int
    num_equivalent: int
    survivors: list[Row]

    def __str__(self) -> str:
        num_dead, num_all = (
            self.num_killed + self.num_timeouts,
            self.num_killed + self.num_timeouts + len(self.survivors),
        )
        low, high = interval(num_dead, num_all)
        return (
            f"{num_dead} of {num_all} killed ({self.num_timeouts} by time), {num_dead / max(num_all, 1):.1%} "
            f"[{low:.1%}, {high:.1%}]; {self.num_equivalent} equivalent"
        )


def interval(num_found: int, num_all: int) -> tuple[float, float]:
    """Wilson's 95 % confidence interval of a share."""
    if num_all == 0:
        return 0.0, 1.0
    share, spread = num_found / num_all, _Z * _Z / num_all
    middle = share + spread / 2
    half = _Z * sqrt(share * (1 - share) / num_all + spread / (4 * num_all))
    return (middle - half) / (1 + spread), (middle + half) / (1 + spread)


def read(path: Path) -> list[Row]:
    """The rows of a file, the last of each mutant; none where there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [Row(**json.loads(line)) for line in lines]
    return list({row.name: row for row in rows}.values())


def append(path: Path, row: Row) -> None:
    """Add a row."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def equivalents(path: Path = _EQUIVALENT) -> dict[tuple[str, str, str], str]:
    """Accepted mutants, with the reason."""
    return dict(_listed(yaml.safe_load(path.read_text()) or []))


def _listed(entries: Iterable[Mapping[str, str]]) -> Iterator[tuple[tuple[str, str, str], str]]:
    for entry in entries:
        yield (entry["file"], entry["before"], entry["after"]), entry["why"]


def summary(rows: Iterable[Row], accepted: Mapping[tuple[str, str, str], str]) -> Summary:
    """Of the rows of one area."""
    outcomes: dict[str, list[Row]] = {"killed": [], "timeout": [], "survived": []}
    for row in rows:
        outcomes[row.outcome].append(row)
    survivors = [row for row in outcomes["survived"] if row.name not in accepted]
    num_equivalent = len(outcomes["survived"]) - len(survivors)
    return Summary(len(outcomes["killed"]), len(outcomes["timeout"]), num_equivalent, survivors)
