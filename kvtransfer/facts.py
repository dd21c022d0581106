"""What the two ends of a handoff are: compared in handshakes, and named in messages. Fixed for the life of a node."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.integrity import XXH3
from kvtransfer.messages import ProcessIdentity
from wire.layout import KvLayout


@dataclass(frozen=True, slots=True)
class SendingFacts:
    """What a prefill node is. `lease_s`: how long blocks are held for a receiver that says nothing."""

    node_id: str
    epoch: int
    fingerprint: str
    layout: KvLayout
    process: ProcessIdentity
    lease_s: float
    checksum: str = XXH3


@dataclass(frozen=True, slots=True)
class ReceivingFacts:
    """What a decode node is. `lease_s`: how long blocks are reserved for a sender that says nothing."""

    node_id: str
    epoch: int
    fingerprint: str
    layout: KvLayout
    num_blocks: int
    process: ProcessIdentity
    lease_s: float
    checksum: str = XXH3
