"""The command line of a node program: flags, help and settings. Imports no torch, so that help answers at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from baton.runtime.command_line import CommandParser
from baton.runtime.exit_status import report_errors
from baton.runtime.settings import add_flags, check_file_keys, resolve


def run_command(name: str, settings_class: type[Any], serve: Callable[[Any], None], argv: Sequence[str] | None) -> int:
    """Parse `argv` into `settings_class` and call `serve` with it; the exit status."""
    parser = CommandParser(prog=f"baton {name}", description=f"Run one {name} node.")
    add_flags(parser, settings_class)
    flags = parser.parse(argv)

    def run() -> None:
        if flags.config:
            check_file_keys(flags.config, settings_class)
        serve(resolve(settings_class, flags))

    return report_errors(run)
