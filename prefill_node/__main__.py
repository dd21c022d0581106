"""`python -m prefill_node`: a prefill node from its command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from engine.api.process import report_errors
from engine.api.settings import add_flags, check_file_keys, resolve
from prefill_node.settings import PrefillNodeSettings


def main(argv: Sequence[str] | None = None) -> int:
    """Run a prefill node until it is told to stop; the exit status."""
    parser = argparse.ArgumentParser("baton prefill", description="Run one prefill node.")
    add_flags(parser, PrefillNodeSettings)
    flags = parser.parse_args(argv)
    # help and wrong flags answer before torch is imported
    from engine.service.process import run_node
    from prefill_node.node import PrefillRole

    def run() -> None:
        if flags.config:
            check_file_keys(flags.config, PrefillNodeSettings)
        run_node(resolve(PrefillNodeSettings, flags), PrefillRole)

    return report_errors(run)


if __name__ == "__main__":
    sys.exit(main())
