"""`baton version`: the version of the installed distribution."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

from baton.runtime.command_line import CommandParser

DISTRIBUTION = "baton-serve"


def main(arguments: Sequence[str]) -> int:
    """Print `baton X.Y.Z`."""
    CommandParser(prog="baton version", description="Print the version.").parse(arguments)
    print(version_line())
    return 0


def version_line() -> str:
    """The line that `baton version` prints."""
    try:
        return f"baton {importlib.metadata.version(DISTRIBUTION)}"
    except importlib.metadata.PackageNotFoundError:
        return "baton (a source tree that is not installed)"
