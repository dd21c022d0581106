"""The parser of command lines whose mistakes are one line with the likely spelling, not a page of usage.

Owns the wording of such a line, and how much `--help` shows: flags of a group are many, and are shown when they are
asked for. Knows no command: flags come from a settings dataclass (`baton.runtime.settings`) or from whoever makes the
parser. Abbreviated flags are refused, so that a flag added later never changes what a script means.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from baton.runtime.exit_status import USAGE_STATUS
from baton.runtime.ranges import Range

ALL_GROUPS = "all"


def closest(word: str, known: Iterable[str]) -> str:
    """`": did you mean X?"` for the known word that is most like `word`, "" when none is like it."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f": did you mean {found[0]}?" if found else ""


def number_in(allowed: Range) -> Callable[[str], float]:
    """The `type` of an argument that is a number."""

    def parsed(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r:.100} is not a number") from None
        if number not in allowed:
            raise argparse.ArgumentTypeError(f"{number:g} is not {allowed}")
        return number

    return parsed


class CommandParser(argparse.ArgumentParser):
    """An `ArgumentParser` that answers a mistake with one line on stderr and exit status 2.

    With groups, `--help` shows what is in none of them, and their names; `--help GROUP` shows one, `--help all` all.
    """

    def __init__(self, *, allow_abbrev: bool = False, **options: Any) -> None:
        super().__init__(allow_abbrev=allow_abbrev, add_help=False, **options)
        self._groups: dict[str, argparse._ArgumentGroup] = {}
        self.add_argument("-h", "--help", nargs="?", metavar="GROUP", action=_Help, help="show this help and exit")

    def group(self, name: str) -> argparse._ActionsContainer:
        """The group of that name, made when it is first asked for; "": where flags are that `--help` always shows."""
        if not name:
            return self
        if name not in self._groups:
            self._groups[name] = self.add_argument_group(name)
        return self._groups[name]

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

    def help_on(self, name: str) -> str:
        """The text that `--help NAME` shows; "": `--help`. Exits where there is no such group."""
        if name and name != ALL_GROUPS and self._groups and name not in self._groups:
            self.error(f"there is no group of flags {name!r:.100}, but {', '.join([*self._groups, ALL_GROUPS])}")
        formatter = self._get_formatter()
        is_whole = name in ("", ALL_GROUPS) or not self._groups
        if is_whole:
            words = " ".join(f"[{action.dest.upper()}]" for action in self._get_positional_actions())
            short = " ".join(filter(None, (self.prog, words, "[FLAG ...]"))) if self._groups else None
            formatter.add_usage(self.usage or short, self._actions, self._mutually_exclusive_groups)
            formatter.add_text(self.description)
        for group in self._action_groups:
            is_own = group not in self._groups.values()
            if (is_own and is_whole) or name == ALL_GROUPS or name == group.title:
                formatter.start_section(group.title)
                formatter.add_arguments(group._group_actions)
                formatter.end_section()
        if self._groups and not name:
            formatter.add_text(f"More with --help GROUP, one of {', '.join([*self._groups, ALL_GROUPS])}.")
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def format_help(self) -> str:
        """The text that `--help` shows where no group of flags is named."""
        return self.help_on("")

    def error(self, message: str) -> NoReturn:
        """Print `message` as one line and exit."""
        sys.stderr.write(f"error: {message} ({self.prog} --help)\n")
        sys.exit(USAGE_STATUS)


class _Help(argparse.Action):
    def __init__(self, option_strings: Sequence[str], **options: Any) -> None:
        super().__init__(option_strings, **{**options, "dest": argparse.SUPPRESS, "default": argparse.SUPPRESS})

    def __call__(self, parser: argparse.ArgumentParser, _found: object, name: Any, _flag: str | None = None) -> None:
        sys.stdout.write(parser.help_on(name or "") if isinstance(parser, CommandParser) else parser.format_help())
        parser.exit()
