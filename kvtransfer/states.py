"""The life of a handoff on each side: states, allowed transitions, and one function that moves between them.

Sender (P)                                        Receiver (D)

    COMPUTING   prompt not finished                   GRANTED     blocks set aside, P may write
        │                                                 │
    PUSHING     token 1 is out, blocks remain ◄─┐     COMMITTED   all sent, some not arrived or verified
        │                                       │         │   (damaged once: GRANTED again, and Resend to P)
    COMMITTED   all sent, D verifies ──Resend───┘     DELIVERED   verified; blocks are the request's
        │                                                 │
    ENDED       blocks back in P's cache              ENDED

    WITHDRAWING (from any but ENDED): no new          REVOKING (from GRANTED, COMMITTED): blocks stay set aside
    writes, waiting for those under way               until P acknowledges or the writer is gone or fenced

Every move is stamped with a monotonic time; the stamps are the transfer's latency figures.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar


class SendingState(Enum):
    """States of a handoff at its sender."""

    COMPUTING = "computing"
    PUSHING = "pushing"
    COMMITTED = "committed"
    WITHDRAWING = "withdrawing"
    ENDED = "ended"


class ReceivingState(Enum):
    """States of a handoff at its receiver."""

    GRANTED = "granted"
    COMMITTED = "committed"
    DELIVERED = "delivered"
    REVOKING = "revoking"
    ENDED = "ended"


StateT = TypeVar("StateT", SendingState, ReceivingState)

SENDING_MOVES: dict[SendingState, frozenset[SendingState]] = {
    SendingState.COMPUTING: frozenset({SendingState.PUSHING, SendingState.WITHDRAWING}),
    SendingState.PUSHING: frozenset({SendingState.COMMITTED, SendingState.WITHDRAWING}),
    SendingState.COMMITTED: frozenset({SendingState.PUSHING, SendingState.ENDED, SendingState.WITHDRAWING}),
    SendingState.WITHDRAWING: frozenset({SendingState.ENDED}),
    SendingState.ENDED: frozenset(),
}

RECEIVING_MOVES: dict[ReceivingState, frozenset[ReceivingState]] = {
    ReceivingState.GRANTED: frozenset({ReceivingState.COMMITTED, ReceivingState.REVOKING, ReceivingState.ENDED}),
    ReceivingState.COMMITTED: frozenset(
        {ReceivingState.GRANTED, ReceivingState.DELIVERED, ReceivingState.REVOKING, ReceivingState.ENDED}
    ),
    ReceivingState.DELIVERED: frozenset({ReceivingState.ENDED}),
    ReceivingState.REVOKING: frozenset({ReceivingState.ENDED}),
    ReceivingState.ENDED: frozenset(),
}


@dataclass(slots=True)
class Progress(Generic[StateT]):
    """The current state and when each state was entered (seconds, monotonic)."""

    state: StateT
    stamps: dict[StateT, float] = field(default_factory=dict)

    def move(self, target: StateT, moves: dict[StateT, frozenset[StateT]], now_s: float) -> None:
        """Enter `target`. Raises `RuntimeError` for a move that the table does not allow: that is our own bug."""
        if target not in moves[self.state]:
            raise RuntimeError(f"handoff cannot move from {self.state.value} to {target.value}")
        self.state = target
        self.stamps[target] = now_s
