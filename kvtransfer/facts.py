"""The properties of the two ends of a handoff. Handshakes compare them, and they are fixed for the life of a node."""

from __future__ import annotations

from dataclasses import dataclass

from baton.kvtransfer.integrity import XXH3
from baton.kvtransfer.messages import ProcessIdentity
from baton.wire.layout import KvLayout


@dataclass(frozen=True, slots=True)
class SendingFacts:
    """The properties of a prefill node. `lease_s`: how long blocks are held for a receiver that sends nothing."""

    node_id: str
    epoch: int
    fingerprint: str
    layout: KvLayout
    process: ProcessIdentity
    lease_s: float
    checksum: str = XXH3


@dataclass(frozen=True, slots=True)
class ReceivingFacts:
    """The properties of a decode node. `lease_s`: how long blocks are reserved for a sender that sends nothing."""

    node_id: str
    epoch: int
    fingerprint: str
    layout: KvLayout
    num_blocks: int
    process: ProcessIdentity
    lease_s: float
    checksum: str = XXH3
