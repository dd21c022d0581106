"""Makes a node stamp each token that it sends to its router."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from baton.node.router_link import RouterLink
from baton.wire.messages.output import TokenEvent
from tests.stations.ring import Ring, Station, handoff_key


def stamped(path: Path) -> Any:
    """While this context lasts, nodes of this process stamp into the file `path`."""
    ring = Ring(path)
    send_tokens = RouterLink.send_tokens

    def stamp_and_send(link: RouterLink, events: Sequence[TokenEvent]) -> None:
        for event in events:
            last = event.index + len(event.token_ids) - 1
            ring.add(Station.EMITTED, handoff=handoff_key(event.handoff_id), index=last)
        send_tokens(link, events)

    return mock.patch.object(RouterLink, "send_tokens", stamp_and_send)
