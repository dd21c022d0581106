"""The `baton` command: finds the subcommand, runs it, and turns its end into an exit status.

Owns the table of subcommands and what a person sees when one fails. Does not know their flags.
Invariants: a subcommand's module is imported only when it is asked for, so `baton --help` needs neither torch nor
aiohttp; an error raised on purpose is one `error: ...` line on stderr and a status of `baton.runtime.exit_status`.
`baton` alone prints the help.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from baton.launch.version import version_line
from baton.runtime.command_line import CommandParser, closest
from baton.runtime.exit_status import FAILED_STATUS, report_errors
from baton.wire.errors import BatonError


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: the module whose `function(arguments) -> int` runs it, and its line in the help."""

    module: str
    doc: str
    function: str = "main"


COMMANDS = {
    "serve": Command("baton.launch.serve", "start a router, prefill nodes and decode nodes on this machine"),
    "cluster": Command(
        "baton.launch.cluster.command", "start, show and end a deployment that a file describes, on Ray"
    ),
    "router": Command("baton.router.__main__", "start one router"),
    "prefill": Command("baton.launch.node_group", "start one prefill node, or a group of them", "prefill"),
    "decode": Command("baton.launch.node_group", "start one decode node, or a group of them", "decode"),
    "node": Command("baton.launch.node_group", "start one node that does any leg, or a group of them", "mixed"),
    "rank": Command(
        "baton.ranks.command", "start the ranks of a node that are on this machine, for a driver elsewhere"
    ),
    "plan": Command("baton.launch.plan.command", "what of a model fits on which devices, from its config alone"),
    "bench": Command("baton.bench.command", "measure parts of Baton on this machine"),
    "chat": Command("baton.launch.chat", "talk to a running router in the terminal"),
    "drain": Command("baton.launch.drain", "take a node out of service, without an interrupted stream"),
    "restart": Command("baton.launch.restart", "restart the nodes of `baton serve` one after another, likewise"),
    "cache": Command("baton.launch.cache", "list, verify or empty a folder of --kv-disk"),
    "key": Command("baton.launch.key", "write a cluster key"),
    "keys": Command("baton.launch.keys", "make an API key for clients of the router"),
    "doctor": Command("baton.launch.doctor", "what this machine has of what Baton uses, and how to get the rest"),
    "completion": Command("baton.launch.completion", "print a script with which bash, zsh or fish completes commands"),
    "version": Command("baton.launch.version", "print the version"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `baton COMMAND ...` and return its exit status."""
    parser = _parser()
    parsed = parser.parse(argv)
    if parsed.command is None:
        parser.print_help()
        return 0
    if parsed.command not in COMMANDS:
        parser.error(f"unknown command {parsed.command!r:.100}{closest(parsed.command, COMMANDS)}")
    command = COMMANDS[parsed.command]
    return _report_lost_output(lambda: report_errors(lambda: _load(command)(parsed.arguments)))


def _load(command: Command) -> Callable[[Sequence[str]], int]:
    """The function of a command. Raises `BatonError` where a package that it needs is not installed."""
    try:
        module = importlib.import_module(command.module)
    except ModuleNotFoundError as error:
        raise BatonError(f"{error.name} is not installed, see `baton doctor`: pip install baton-serve") from None
    return cast("Callable[[Sequence[str]], int]", getattr(module, command.function))


def _report_lost_output(run: Callable[[], int]) -> int:
    """The status of `run`. Where its output cannot be written any more it ends, and without a word if that is because
    whoever read it has gone, as `head` does."""
    try:
        status = run()
        sys.stdout.flush()
        return status
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still to be flushed would fail again
        if error.errno == errno.ENOSPC:
            sys.stderr.write(f"error: the output cannot be written: {error.strerror}\n")
        return FAILED_STATUS


def _parser() -> CommandParser:
    listing = "\n".join(f"  {name:<10} {command.doc}" for name, command in COMMANDS.items())
    parser = CommandParser(
        prog="baton",
        usage="baton COMMAND ...",
        description="Disaggregated prefill/decode serving for large language models.",
        epilog=f"commands:\n{listing}\n\n`baton COMMAND --help` lists the usual settings of one command.\n"
        "exit status: 0 done, 1 failed while running, 2 a flag, file or checkpoint cannot be used, 130 Ctrl-C",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=version_line(), help="print the version")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="what to run, see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser
