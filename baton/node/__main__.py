"""`python -m baton.node`: a node that does any leg, from its command line. As a program it stands above both legs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from baton.node.command import run_command
from baton.node.settings import MixedNodeSettings
from baton.runtime.process import quick_imports


def _serve(settings: MixedNodeSettings) -> None:
    # imported late: these bring in torch, and help and wrong flags have been answered by now
    with quick_imports():
        from baton.decode_node.node import make_decode
        from baton.node.mixed import mixed_role
        from baton.node.process import run_node
        from baton.prefill_node.node import make_prefill

    run_node(settings, mixed_role(settings.role, make_prefill, make_decode))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a node until it is told to stop; the exit status."""
    return run_command("node", MixedNodeSettings, _serve, argv)


if __name__ == "__main__":
    sys.exit(main())
