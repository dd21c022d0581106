"""The life of a handoff on each side: its states, the moves between them, and the object that makes the moves.

`SENDING_MOVES` and `RECEIVING_MOVES` are the tables of `docs/protocol.md`, where each state is described; a test
compares them. The progress of a handoff is stored in its state and nowhere else.

Sender (P)                                          Receiver (D)

    COMPUTING   the prompt is not finished              WAITING     there are no blocks for it yet
        |                                                   |
    PUSHING     token 1 is sent, blocks remain<-+       RESERVED    blocks are held, the Grant is not sent yet
        |                                       |           |
    COMMITTED   all pushed, D verifies --Resend-+       GRANTED     P may write <-----------------------+
        |                                                   |                                           |
    RELEASING   D has all the KV                        COMMITTED   all pushed, not all verified --Resend-+
        |                                                   |
    ENDED                                               DELIVERED   verified; the blocks are the request's

    CANCELLING  from the first three: no push begins    REVOKING    from GRANTED and COMMITTED: blocks are quarantined
        |       any more, running reads are awaited     FENCING     P has finished, but its writes may still land
    ENDED                                               CUT_OFF     D's endpoint has ended, P may still write
                                                        ENDED       nothing can be written; blocks are released

Every move is stamped with a monotonic time; the stamps are the transfer's latency figures.
"""

from __future__ import annotations

from enum import Enum
from typing import Generic, TypeVar


class SendingState(Enum):
    """States of a handoff at its sender."""

    COMPUTING = "computing"
    PUSHING = "pushing"
    COMMITTED = "committed"
    RELEASING = "releasing"
    CANCELLING = "cancelling"
    ENDED = "ended"


class ReceivingState(Enum):
    """States of a handoff at its receiver."""

    WAITING = "waiting"
    RESERVED = "reserved"
    GRANTED = "granted"
    COMMITTED = "committed"
    DELIVERED = "delivered"
    REVOKING = "revoking"
    FENCING = "fencing"
    CUT_OFF = "cut_off"
    ENDED = "ended"


StateT = TypeVar("StateT", SendingState, ReceivingState)

_S, _R = SendingState, ReceivingState

SENDING_MOVES: dict[SendingState, frozenset[SendingState]] = {
    _S.COMPUTING: frozenset({_S.PUSHING, _S.CANCELLING}),
    _S.PUSHING: frozenset({_S.COMMITTED, _S.CANCELLING}),
    _S.COMMITTED: frozenset({_S.PUSHING, _S.RELEASING, _S.CANCELLING}),
    _S.RELEASING: frozenset({_S.ENDED}),
    _S.CANCELLING: frozenset({_S.ENDED}),
    _S.ENDED: frozenset(),
}

RECEIVING_MOVES: dict[ReceivingState, frozenset[ReceivingState]] = {
    _R.WAITING: frozenset({_R.RESERVED, _R.ENDED}),
    _R.RESERVED: frozenset({_R.GRANTED, _R.ENDED}),
    _R.GRANTED: frozenset({_R.COMMITTED, _R.REVOKING}),
    _R.COMMITTED: frozenset({_R.GRANTED, _R.DELIVERED, _R.REVOKING}),
    _R.DELIVERED: frozenset(),
    _R.REVOKING: frozenset({_R.FENCING, _R.CUT_OFF, _R.ENDED}),
    _R.FENCING: frozenset({_R.ENDED}),
    _R.CUT_OFF: frozenset({_R.ENDED}),
    _R.ENDED: frozenset(),
}


class Lifecycle(Generic[StateT]):
    """The current state, and when each state was last entered (`entered_s`: seconds, monotonic)."""

    __slots__ = ("_moves", "entered_s", "state")

    def __init__(self, first: StateT, moves: dict[StateT, frozenset[StateT]], now_s: float) -> None:
        self.state: StateT = first
        self.entered_s: dict[StateT, float] = {first: now_s}
        self._moves: dict[StateT, frozenset[StateT]] = moves

    @property
    def since_s(self) -> float:
        """When the current state was entered, in seconds, monotonic."""
        return self.entered_s[self.state]

    def enter(self, target: StateT, now_s: float) -> None:
        """Move to `target`. Raises `RuntimeError` for a move that the table does not allow: that is our own bug."""
        if target not in self._moves[self.state]:
            raise RuntimeError(f"handoff cannot move from {self.state.value} to {target.value}")
        self.state = target
        self.entered_s[target] = now_s
