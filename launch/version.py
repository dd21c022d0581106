"""`baton version`: the version of the installed distribution."""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Sequence

DISTRIBUTION = "baton-serve"


def main(arguments: Sequence[str]) -> int:
    """Print `baton X.Y.Z`."""
    argparse.ArgumentParser(prog="baton version", description="Print the version.").parse_args(arguments)
    try:
        print(f"baton {importlib.metadata.version(DISTRIBUTION)}")
    except importlib.metadata.PackageNotFoundError:
        print("baton (a source tree that is not installed)")
    return 0
