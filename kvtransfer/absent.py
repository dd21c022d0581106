"""The sender's memory of handoffs that it does not have: grants that came before their prompt, and handoffs that ended.

Messages cross each other and are lost, duplicated and late. An early grant waits one lease for its prompt. A handoff
that ended is remembered, so that a late message about it is answered and the handoff never begins again.

Invariants: both memories are bounded. The first record of an end is never overwritten, because a handoff that is
revoked twice may still need its fence.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from baton.kvtransfer.messages import Grant, HandoffName, Revoked
from baton.kvtransfer.sender_connections import Peer
from baton.wire.request_key import RequestKey

_MAX_EARLY = 4096
_MAX_ENDED = 4096


@dataclass(frozen=True, slots=True)
class EarlyGrant:
    """A grant without a prompt, the peer that sent it, and the deadline until which it waits."""

    peer: Peer
    grant: Grant
    deadline_s: float


class EarlyGrants:
    """Grants that wait for their prompt. They are checked when the prompt comes, not before."""

    def __init__(self) -> None:
        self._grants: dict[RequestKey, EarlyGrant] = {}

    def put(self, early: EarlyGrant) -> bool:
        """Store a grant. Returns False when there are too many."""
        has_room = len(self._grants) < _MAX_EARLY
        if has_room:
            self._grants[early.grant.handoff.key] = early
        return has_room

    def take(self, key: RequestKey) -> EarlyGrant | None:
        """Remove and return the grant for this prompt; None if there is none."""
        return self._grants.pop(key, None)

    def take_overdue(self, now_s: float) -> list[EarlyGrant]:
        """Remove and return the grants whose prompt did not come before their deadline."""
        found = [early for early in self._grants.values() if early.deadline_s <= now_s]
        for early in found:
            del self._grants[early.grant.handoff.key]
        return found

    def take_of(self, receiver_epoch: int) -> list[EarlyGrant]:
        """Remove and return the grants of a receiver with this epoch, because they are void."""
        found = [early for early in self._grants.values() if early.grant.receiver_epoch == receiver_epoch]
        for early in found:
            del self._grants[early.grant.handoff.key]
        return found


@dataclass(frozen=True, slots=True)
class End:
    """How a handoff ended; the fields are those of `Revoked`."""

    request_ended: bool = False
    needs_fence: bool = False


class EndedHandoffs:
    """The ends of the last few thousand handoffs."""

    def __init__(self) -> None:
        self._ends: OrderedDict[RequestKey, End] = OrderedDict()

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._ends

    def remember(self, key: RequestKey, end: End | None = None) -> None:
        """Record that a handoff has ended or will never begin. Only the first record of a handoff counts."""
        self._ends.setdefault(key, end or End())
        while len(self._ends) > _MAX_ENDED:
            self._ends.popitem(last=False)

    def revoked(self, name: HandoffName, reason: str) -> Revoked:
        """The message that tells a receiver how this handoff ended."""
        end = self._ends.get(name.key, End())
        return Revoked(name, reason, end.request_ended, end.needs_fence)
