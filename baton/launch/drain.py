"""`baton drain NODE`: take a node, or a group of them, out of service. It gets no more work, other decode nodes go on
with what it generates, and then it ends.

Owns the waiting for a node to leave, and to come back. Everything else is the router's.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from baton.launch.api_client import ApiClient
from baton.router.http.access.keys import KEY_VARIABLE
from baton.runtime.command_line import CommandParser, number_in
from baton.runtime.ranges import SECONDS_OR_NONE
from baton.wire.errors import RequestFailed

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT_S = 600.0
_POLL_S = 0.1


def main(arguments: Sequence[str]) -> int:
    """Drain one node and wait until it has left."""
    parser = CommandParser(
        prog="baton drain",
        description="Take a node out of service: it gets no more work, other decode nodes go on with what it "
        "generates, and it ends. `baton serve` does not start it again.",
    )
    parser.add_argument(
        "node",
        metavar="NODE",
        help="its --node-id, or the name of a group; `baton serve` calls them prefill-0, decode-0, ...",
    )
    add_router_flags(parser)
    parsed = parser.parse(arguments)
    Operator(ApiClient(parsed.url, os.environ.get(KEY_VARIABLE, "")), parsed.timeout_s).drain(parsed.node)
    return 0


def add_router_flags(parser: CommandParser) -> None:
    """The flags that say which router is asked, and how long it may take."""
    parser.add_argument("--url", default=DEFAULT_URL, help=f"address of the router (default: {DEFAULT_URL})")
    parser.add_argument(
        "--timeout-s",
        type=number_in(SECONDS_OR_NONE),
        default=DEFAULT_TIMEOUT_S,
        help="seconds to wait for one node (default: 600)",
    )


class Operator:
    """Asks one router. Says on stderr what happens; raises `RequestFailed` for what does not within `timeout_s`."""

    def __init__(self, client: ApiClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    def drain(self, name: str) -> None:
        """Drain a node, or the nodes of a group, and wait until they have left."""
        self._ask(name, restart=False)
        self._wait(lambda: not self._lives(name), f"{name} has not left")
        _say(f"{name} has left")

    def restart(self, name: str) -> None:
        """Drain a node, or the nodes of a group, and wait until they serve again.

        Another router may answer than the one that was asked before, and not know yet that a node leaves. So this waits
        for another life of each.
        """
        before = self._lives(name)
        self._ask(name, restart=True)
        self._wait(lambda: self._serve_anew(name, before), f"{name} does not serve again: does anything start it?")
        _say(f"{name} serves again")

    def nodes(self) -> list[str]:
        """The nodes that serve: prefill nodes first."""
        serving = [node for node in self._client.nodes() if not node.get("is_leaving")]
        return [str(node.get("id")) for node in sorted(serving, key=lambda node: node.get("role") != "prefill")]

    def _ask(self, node: str, *, restart: bool) -> None:
        num_requests = self._client.drain(node, restart=restart)
        _say(f"{node} drains: {num_requests} requests")

    def _lives(self, name: str) -> dict[str, Any]:
        """The nodes of that name, as a router answers `/admin/drain`, each with the life that it is in."""
        nodes = self._client.nodes()
        found = [node for node in nodes if node.get("id") == name] or [
            node for node in nodes if node.get("group") == name
        ]
        return {str(node.get("id")): None if node.get("is_leaving") else node.get("life") for node in found}

    def _serve_anew(self, name: str, before: dict[str, Any]) -> bool:
        now = self._lives(name)
        is_whole = bool(now) and now.keys() >= before.keys()
        return is_whole and all(life is not None and life != before.get(node) for node, life in now.items())

    def _wait(self, is_over: Callable[[], bool], otherwise: str) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        while not is_over():
            if time.monotonic() > deadline_s:
                raise RequestFailed(f"after {self._timeout_s:g} s {otherwise}")
            time.sleep(_POLL_S)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
