"""Every message between two programs has its row on the pages of the protocol."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.kvtransfer import messages as peers
from baton.kvtransfer.transports.nccl import wire as nccl
from baton.kvtransfer.transports.shm import slots_wire as slots
from baton.ranks.machines import link as machines
from baton.wire.messages import vocabulary as control

_DOCS = Path(__file__).parents[2] / "docs"
_ROWS = [
    line.split("|")[1]
    for page in ("protocol.md", "protocol_ranks.md")
    for line in (_DOCS / page).read_text().splitlines()
    if line.startswith("|")
]
CODECS = (
    control.ROUTER_TO_NODE,
    control.NODE_TO_ROUTER,
    peers.RECEIVER_TO_SENDER,
    peers.SENDER_TO_RECEIVER,
    slots.TO_RECEIVER,
    slots.TO_SENDER,
    nccl.TO_RECEIVER,
    nccl.TO_SENDER,
    machines.TO_DRIVER,
    machines.TO_MACHINE,
)
NAMES = sorted({kind.__name__ for codec in CODECS for kind in codec.message_types})


@pytest.mark.parametrize("name", NAMES)
def test_a_message_has_a_row(name: str) -> None:
    assert any(name in row for row in _ROWS), f"{name} is on no page"
