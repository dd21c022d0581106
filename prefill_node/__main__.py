"""`python -m baton.prefill_node`: a prefill node from its command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from baton.node.command import run_command
from baton.prefill_node.settings import PrefillNodeSettings
from baton.runtime.process import quick_imports


def _serve(settings: PrefillNodeSettings) -> None:
    # imported late: these bring in torch, and help and wrong flags have been answered by now
    with quick_imports():
        from baton.node.process import run_node
        from baton.prefill_node.node import PrefillRole

    run_node(settings, PrefillRole)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a prefill node until it is told to stop; the exit status."""
    return run_command("prefill", PrefillNodeSettings, _serve, argv)


if __name__ == "__main__":
    sys.exit(main())
