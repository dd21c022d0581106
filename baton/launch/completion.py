"""`baton completion SHELL`: a script with which a shell completes commands, flags and their values.

Owns the tree of all commands, of the flags that they list themselves, so that none is written down here. What a script
looks like is shtab's. Invariant: a script runs nothing of Baton, so that a tab is never slow.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import shtab

from baton.bench.command import BENCHMARKS
from baton.launch import cli
from baton.runtime.command_line import LIST_FLAGS, CommandParser

SHELLS = ("bash", "zsh", "fish")
_LISTS: dict[tuple[str, ...], Mapping[str, str]] = {
    (): {name: command.doc for name, command in cli.COMMANDS.items()},
    ("bench",): BENCHMARKS,
}
"""By the words before them, the commands that their module is not asked for, and a line about each."""


def main(arguments: Sequence[str]) -> int:
    """Print the script of a shell."""
    parser = CommandParser(
        prog="baton completion",
        description="Print a script with which a shell completes commands and flags. Write it where the shell looks: "
        "bash into ~/.local/share/bash-completion/completions/baton, zsh into a file _baton in a folder of $fpath, "
        "fish into ~/.config/fish/completions/baton.fish.",
    )
    parser.add_argument("shell", choices=SHELLS, metavar="{bash,zsh,fish}", help="the shell")
    shell: str = parser.parse(arguments).shell
    tree = argparse.ArgumentParser(prog="baton", add_help=False)
    _grow(tree, ())
    print(shtab.complete(tree, shell))
    return 0


def _grow(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> None:
    """Give `parser` the flags of the command of these words, and the commands that may follow them."""
    listed = _listed(words)
    followers = _LISTS.get(words) or dict.fromkeys(listed["subcommands"], " ".join(words))
    for flag in listed["flags"]:
        if flag["names"][0].startswith("-") or not followers:
            _add(parser, flag)
    if followers:
        commands = parser.add_subparsers()
        for name, doc in followers.items():
            _grow(commands.add_parser(name, help=doc, add_help=False), (*words, name))


def _listed(words: Sequence[str]) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        cli.main([*words, LIST_FLAGS])
    found: dict[str, Any] = json.loads(shown.getvalue())
    return found


def _add(parser: argparse.ArgumentParser, flag: Mapping[str, Any]) -> None:
    names = [name for name in flag["names"] if not re.match(r"-\w\w", name)]  # fish takes -tp for -t and -p
    text = flag["help"].partition(" (default")[0].replace("%", "%%")
    if not flag["takes_value"]:
        parser.add_argument(*names, action="store_true", help=text)
        return
    added = parser.add_argument(*names, choices=flag["choices"] or None, help=text)
    if not flag["choices"]:
        vars(added).update(complete=shtab.FILE)
