"""The parser of command lines whose mistakes are one line with the likely spelling, not a page of usage.

Owns the wording of such a line, and how much `--help` shows: flags of a group are many, and are shown when they are
asked for. Also the list of all flags for programs, from which shell completion is made. Knows no command: flags come
from a settings dataclass (`baton.runtime.settings`) or from whoever makes the parser. Abbreviated flags are refused, so
that a flag added later never changes what a script means.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from baton.runtime.exit_status import USAGE_STATUS
from baton.runtime.ranges import Range

ALL_GROUPS = "all"
LIST_FLAGS = "--help-json"
"""Prints the flags as JSON: for programs, and in no help."""


def closest(word: str, known: Iterable[str]) -> str:
    """`": did you mean X?"` for the shortest known word that begins with `word`, else for the one that is most like it;
    "" when none is."""
    words = sorted(known, key=len)
    found = [each for each in words if each.startswith(word)] or difflib.get_close_matches(word, words, n=1)
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

    With groups, `--help` shows what is in none of them, and a line for each; `--help GROUP` shows one, `--help-all`
    all, as `--help all` does.
    """

    def __init__(self, *, allow_abbrev: bool = False, **options: Any) -> None:
        super().__init__(allow_abbrev=allow_abbrev, add_help=False, **options)
        self._groups: dict[str, argparse._ArgumentGroup] = {}
        self.add_argument("-h", "--help", nargs="?", metavar="GROUP", action=_Help, help="show this help and exit")
        self.add_argument("--help-all", nargs=0, const=ALL_GROUPS, action=_Help, help="show the help on every flag")
        self.add_argument(LIST_FLAGS, nargs=0, action=_ListFlags, help=argparse.SUPPRESS)

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
            flags = (
                flag for action in self._actions if action.help != argparse.SUPPRESS for flag in action.option_strings
            )
            meant = name.replace("--disable-", "--no-enable-", 1)  # as other servers spell it
            self.error(f"unknown {kind} {name!r:.100}{closest(meant, flags) if kind == 'flag' else ''}")
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
        formatter.add_text(self.epilog)
        return formatter.format_help() + ("" if name else self._groups_in_lines(formatter._width))

    def _groups_in_lines(self, width: int) -> str:
        """A line for each group, with the first of its flags."""
        if not self._groups:
            return ""
        names_width = max(map(len, self._groups)) + 4
        lines = ["", "more flags, by group (--help GROUP shows one, --help-all every flag):"]
        for name, group in self._groups.items():
            flags = " ".join(action.option_strings[0] for action in group._group_actions)
            lines.append(
                f"  {name}".ljust(names_width)
                + textwrap.shorten(flags, width - names_width, placeholder=" ...", break_on_hyphens=False)
            )
        return "\n".join([*lines, ""])

    def flags(self) -> list[dict[str, Any]]:
        """Every flag and argument for programs: its spellings, whether a value follows, the values there are, and its
        help."""
        return [
            {
                "names": list(action.option_strings) or [action.dest],
                "takes_value": action.nargs != 0,
                "choices": _values_in(action),
                "help": (action.help or "").replace("%%", "%"),
            }
            for action in self._actions
            if action.help != argparse.SUPPRESS and not isinstance(action.choices, dict)
        ]

    def subcommands(self) -> list[str]:
        """The words of `add_subparsers`, if there are any."""
        return [name for action in self._actions if isinstance(action.choices, dict) for name in action.choices]

    def format_help(self) -> str:
        """The text that `--help` shows where no group of flags is named."""
        return self.help_on("")

    def error(self, message: str) -> NoReturn:
        """Print `message` as one line and exit."""
        sys.stderr.write(f"error: {message} ({self.prog} --help)\n")
        sys.exit(USAGE_STATUS)


def _values_in(action: argparse.Action) -> list[str]:
    """The values that a flag's `{a,b,NAME}` names; those in capitals only stand for some."""
    shown = action.metavar if isinstance(action.metavar, str) else ""
    words = shown[1:-1].split(",") if shown.startswith("{") else []
    return [word for word in words if word == word.lower()]


class _Help(argparse.Action):
    """Shows the help on the group that is named, or on that of `const`."""

    def __init__(self, option_strings: Sequence[str], **options: Any) -> None:
        super().__init__(option_strings, **{**options, "dest": argparse.SUPPRESS, "default": argparse.SUPPRESS})

    def __call__(self, parser: argparse.ArgumentParser, _found: object, name: Any, _flag: str | None = None) -> None:
        group = self.const or name or ""
        sys.stdout.write(parser.help_on(group) if isinstance(parser, CommandParser) else parser.format_help())
        parser.exit()


class _ListFlags(_Help):
    """Prints what completion has to know of a command."""

    def __call__(self, parser: argparse.ArgumentParser, _found: object, _value: Any, _flag: str | None = None) -> None:
        if isinstance(parser, CommandParser):
            sys.stdout.write(json.dumps({"flags": parser.flags(), "subcommands": parser.subcommands()}) + "\n")
        parser.exit()
