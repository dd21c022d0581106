"""Decides when the blocks of a revoked grant may be used again. This is decided nowhere else.

A grant lets a peer write. Once it is revoked, its blocks are quarantined until nothing can be written into them any
more. A timer alone never ends that, because a peer that is slow, frozen or cut off may wake up and write. What counts
as a proof depends on how bytes get into the pool, so each `Receiver` declares its `WriteProof`; `Known` holds the rest.

Pure functions and values: this module knows no handoffs, sockets or clocks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto


class WriteProof(Enum):
    """The proof that no write of a peer can land any more, if the peer does not say so itself."""

    OWN_HANDS = auto()
    """No proof is needed: the receiver writes its pool itself, and only blocks that are granted."""
    WRITER_ENDED = auto()
    """The writing process has ended. Only its own copies move bytes (shared memory)."""
    ENDPOINT_ENDED = auto()
    """The receiver's endpoint has ended. All bytes come through it, and may come after their writer's end (RDMA)."""
    BOTH_ENDED = auto()
    """Bytes come through the endpoint, or through a mapping of the pool that the writer holds. The endpoint must have
    ended, and the writer must have finished or ended. A writer elsewhere cannot have mapped the pool."""


class PeerWord(Enum):
    """The latest statement of the peer about its writes (`Revoked`)."""

    SILENT = auto()
    DONE = auto()
    """No write of the peer is or will be in flight."""
    MAY_LAND = auto()
    """The peer has finished, but what it wrote may still land: `needs_fence`."""


class Writer(Enum):
    """The state of a process that writes, as far as this side knows."""

    MAY_RUN = auto()
    ENDED = auto()
    ELSEWHERE = auto()
    """The process cannot see the processes of this host, and so cannot have mapped their memory."""


def writer_of_all(writers: Collection[Writer]) -> Writer:
    """The state of several processes together, each of which may write. Of none nothing is known."""
    if not writers or Writer.MAY_RUN in writers:
        return Writer.MAY_RUN
    return Writer.ELSEWHERE if Writer.ELSEWHERE in writers else Writer.ENDED


class Verdict(Enum):
    """The action for the blocks of a revoked grant."""

    RELEASE = auto()
    WAIT = auto()
    FENCE = auto()
    """End the own endpoint: only that is missing, or no other proof has come for too long."""


@dataclass(frozen=True, slots=True)
class Known:
    """Everything that is known about a revoked grant. `is_overdue`: the peer has been silent for too long."""

    word: PeerWord
    has_endpoint_ended: bool
    writer: Writer
    is_overdue: bool


def judge(proof: WriteProof, known: Known) -> Verdict:
    """Whether the blocks of a revoked grant may be released."""
    if proof is WriteProof.OWN_HANDS or known.word is PeerWord.DONE:
        return Verdict.RELEASE
    if proof is WriteProof.WRITER_ENDED:
        return Verdict.RELEASE if known.writer is Writer.ENDED else Verdict.WAIT
    if not known.has_endpoint_ended:
        is_due = known.word is PeerWord.MAY_LAND or known.is_overdue
        return Verdict.FENCE if is_due else Verdict.WAIT
    is_unmapped = known.word is PeerWord.MAY_LAND or known.writer is not Writer.MAY_RUN
    return Verdict.RELEASE if proof is WriteProof.ENDPOINT_ENDED or is_unmapped else Verdict.WAIT
