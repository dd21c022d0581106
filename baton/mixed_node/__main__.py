"""`python -m baton.mixed_node`: a node that does any leg, from its command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from baton.mixed_node.settings import MixedNodeSettings
from baton.node.command import run_command
from baton.runtime.process import quick_imports


def _serve(settings: MixedNodeSettings) -> None:
    # imported late: these bring in torch, and help and wrong flags have been answered by now
    with quick_imports():
        from baton.mixed_node.node import MixedRoles
        from baton.node.process import run_node

    run_node(settings, MixedRoles(settings.role))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a mixed node until it is told to stop; the exit status."""
    return run_command("node", MixedNodeSettings, _serve, argv)


if __name__ == "__main__":
    sys.exit(main())
