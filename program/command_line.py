"""The parser of command lines whose mistakes are one line with the likely spelling, not a page of usage.

Owns the wording of such a line. Knows no command: flags come from a settings dataclass (`program.settings`) or from
whoever makes the parser. Abbreviated flags are refused, so that a flag added later never changes what a script means.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from program.exit_status import USAGE_STATUS


def closest(word: str, known: Iterable[str]) -> str:
    """`": did you mean X?"` for the known word that is most like `word`, "" when none is like it."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f": did you mean {found[0]}?" if found else ""


class CommandParser(argparse.ArgumentParser):
    """An `ArgumentParser` that answers a mistake with one line on stderr and exit status 2."""

    def __init__(self, *, allow_abbrev: bool = False, **options: Any) -> None:
        super().__init__(allow_abbrev=allow_abbrev, **options)

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """`parse_args` with a suggestion for a flag that does not exist. None: the arguments of this process."""
        found, unknown = self.parse_known_args(arguments)
        if unknown:
            # the word after a misspelt flag may be its value, so flags are named first
            word = next((word for word in unknown if word.startswith("-")), unknown[0])
            name = word.partition("=")[0]
            kind = "flag" if word.startswith("-") else "argument"
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            self.error(f"unknown {kind} {name!r:.100}{closest(name, flags) if kind == 'flag' else ''}")
        return found

    def error(self, message: str) -> NoReturn:
        """Print `message` as one line and exit."""
        sys.stderr.write(f"error: {message} ({self.prog} --help)\n")
        sys.exit(USAGE_STATUS)
