"""`baton restart --rolling`: restart the nodes of a deployment one after another, while it serves.

Owns the order: prefill nodes first, each when the one before it serves again. Who starts a node that has ended is not
its business: `baton serve` does, and so does any other supervisor that restarts programs which exit.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from baton.launch.api_client import ApiClient
from baton.launch.drain import Operator, add_router_flags
from baton.router.http.access.keys import KEY_VARIABLE
from baton.runtime.command_line import CommandParser


def main(arguments: Sequence[str]) -> int:
    """Restart all nodes, or those that are named."""
    parser = CommandParser(
        prog="baton restart",
        description="Restart nodes one after another. Each hands over what it generates, ends, is started again by "
        "`baton serve` (or whatever watches over it), and serves before the next one is asked.",
    )
    parser.add_argument("nodes", nargs="*", metavar="NODE", help="which nodes; all when none is named")
    parser.add_argument("--rolling", action="store_true", help="say so: there is no other way to restart nodes")
    add_router_flags(parser)
    parsed = parser.parse(arguments)
    if not parsed.rolling:
        parser.error("--rolling is missing: nodes are restarted one after another")
    operator = Operator(ApiClient(parsed.url, os.environ.get(KEY_VARIABLE, "")), parsed.timeout_s)
    for node in parsed.nodes or operator.nodes():
        operator.restart(node)
    return 0
