"""`python -m baton.prefill_node`: a prefill node from its command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from baton.node.command import run_command
from baton.node.settings import NodeSettings
from baton.runtime.process import quick_imports


def _serve(settings: NodeSettings) -> None:
    # imported late: these bring in torch, and help and wrong flags have been answered by now
    with quick_imports():
        from baton.node.process import run_node
        from baton.prefill_node.node import PREFILL_ROLE

    run_node(settings, PREFILL_ROLE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a prefill node until it is told to stop; the exit status."""
    return run_command("prefill", NodeSettings, _serve, argv)


if __name__ == "__main__":
    sys.exit(main())
