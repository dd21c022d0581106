"""`python -m decode_node`: a decode node from its command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from decode_node.settings import DecodeNodeSettings
from engine.api.process import report_errors
from engine.api.settings import add_flags, check_file_keys, resolve


def main(argv: Sequence[str] | None = None) -> int:
    """Run a decode node until it is told to stop; the exit status."""
    parser = argparse.ArgumentParser("baton decode", description="Run one decode node.")
    add_flags(parser, DecodeNodeSettings)
    flags = parser.parse_args(argv)
    # help and wrong flags answer before torch is imported
    from decode_node.node import DecodeRole
    from engine.service.process import run_node

    def run() -> None:
        if flags.config:
            check_file_keys(flags.config, DecodeNodeSettings)
        run_node(resolve(DecodeNodeSettings, flags), DecodeRole)

    return report_errors(run)


if __name__ == "__main__":
    sys.exit(main())
