"""`baton doctor`: what this machine has of what Baton uses, and the command that gets what is missing.

Owns the report. What is looked at, and how, is in `baton.launch.doctor_checks`.
Invariants: each line is printed as soon as it is known, so that what takes long or breaks is seen; whatever a look
raises is a line too. The status is 1 when something that serving needs is missing, else 0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from baton.launch.doctor_checks import CHECKS, MISSING, NOTE, Check, Found
from baton.runtime.command_line import CommandParser
from baton.runtime.exit_status import FAILED_STATUS

_MAX_REASON_CHARS = 200


class Line(NamedTuple):
    """A line of the report. `fix`: the command that gets what is missing, "" where none does or nothing is."""

    state: str
    name: str
    text: str
    fix: str

    def __str__(self) -> str:
        return f"{self.state:<7}  {self.name:<14}  {self.text}{self.fix and f': {self.fix}'}"


def main(arguments: Sequence[str]) -> int:
    """Look at everything and print it; the exit status."""
    parser = CommandParser(prog="baton doctor", description="Say what this machine has of what Baton uses.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return report(CHECKS, as_json=parser.parse(arguments).json)


def report(checks: Iterable[Check], *, as_json: bool) -> int:
    """Print a line for each check, or all of them as one JSON object; the exit status."""
    lines = []
    for line in examine(checks):
        lines.append(line)
        if not as_json:
            print(line, flush=True)
    is_ready = all(line.state != MISSING for line in lines)
    if as_json:
        print(json.dumps({"is_ready": is_ready, "lines": [line._asdict() for line in lines]}))
    elif not is_ready:
        print("error: something that serving needs is missing", file=sys.stderr)
    return 0 if is_ready else FAILED_STATUS


def examine(checks: Iterable[Check]) -> Iterator[Line]:
    """A line for each check."""
    for check in checks:
        try:
            found = check.look()
        except Exception as error:  # an installed package may be broken in every way
            found = Found(MISSING if check.is_needed else NOTE, f"broken: {_in_a_line(error)}", check.fix)
        yield Line(found.state, check.name, found.text, found.fix)


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MAX_REASON_CHARS]
