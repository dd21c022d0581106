"""`baton drain NODE`: take a node out of service. It gets no more work, other decode nodes go on with what it
generates, and then it ends.

Owns the waiting for a node to leave, and to come back. Everything else is the router's.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from launch.api_client import ApiClient
from program.command_line import CommandParser
from router.access.keys import KEY_VARIABLE
from wire.errors import RequestFailed

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
    parser.add_argument("node", metavar="NODE", help="its --node-id; `baton serve` calls them prefill-0, decode-0, ...")
    add_router_flags(parser)
    parsed = parser.parse(arguments)
    Operator(ApiClient(parsed.url, os.environ.get(KEY_VARIABLE, "")), parsed.timeout_s).drain(parsed.node)
    return 0


def add_router_flags(parser: CommandParser) -> None:
    """The flags that say which router is asked, and how long it may take."""
    parser.add_argument("--url", default=DEFAULT_URL, help=f"address of the router (default: {DEFAULT_URL})")
    parser.add_argument(
        "--timeout-s", type=float, default=DEFAULT_TIMEOUT_S, help="seconds to wait for one node (default: 600)"
    )


class Operator:
    """Asks one router. Says on stderr what happens; raises `RequestFailed` for what does not within `timeout_s`."""

    def __init__(self, client: ApiClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    def drain(self, node: str) -> None:
        """Drain a node, and wait until it has left."""
        self._ask(node, restart=False)
        self._wait(lambda: self._state(node) is None, f"{node} has not left")
        _say(f"{node} has left")

    def restart(self, node: str) -> None:
        """Drain a node, and wait until it serves again. Another router may answer than the one that was asked before,
        and not know yet that the node leaves: so another life of it is waited for."""
        before = self._state(node)
        self._ask(node, restart=True)
        self._wait(lambda: self._serves_anew(node, before), f"{node} does not serve again: does anything start it?")
        _say(f"{node} serves again")

    def nodes(self) -> list[str]:
        """The nodes that serve: prefill nodes first."""
        serving = [node for node in self._client.nodes() if not node.get("is_leaving")]
        return [str(node.get("id")) for node in sorted(serving, key=lambda node: node.get("role") != "prefill")]

    def _ask(self, node: str, *, restart: bool) -> None:
        num_requests = self._client.drain(node, restart=restart)
        _say(f"{node} drains: {num_requests} requests")

    def _state(self, node: str) -> dict[str, Any] | None:
        """What is known of a node; None when it is not there."""
        return next((each for each in self._client.nodes() if each.get("id") == node), None)

    def _serves_anew(self, node: str, before: dict[str, Any] | None) -> bool:
        now = self._state(node)
        if now is None or now.get("is_leaving"):
            return False
        return before is None or now.get("life") != before.get("life")

    def _wait(self, is_over: Callable[[], bool], otherwise: str) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        while not is_over():
            if time.monotonic() > deadline_s:
                raise RequestFailed(f"after {self._timeout_s:g} s {otherwise}")
            time.sleep(_POLL_S)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
