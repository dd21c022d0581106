"""What a sender remembers about handoffs that it does not have: grants that came before their prompt, and ends.

Messages cross each other and are lost, doubled and late. An early grant waits one lease for its prompt; a handoff that
ended is remembered, so that whatever comes late about it is answered and never begun again.

Invariants: both are bounded. What was said once about an end is not taken back: a handoff that is revoked again may
still need its fence.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvtransfer.messages import Grant, HandoffName, Revoked
from kvtransfer.sender_connections import Peer
from wire.request_key import RequestKey

_MAX_EARLY = 4096
_MAX_ENDED = 4096


@dataclass(frozen=True, slots=True)
class EarlyGrant:
    """A grant without a prompt, who sent it, and until when it waits."""

    peer: Peer
    grant: Grant
    deadline_s: float


class EarlyGrants:
    """Grants that wait for their prompt. They are looked at when it comes, not before."""

    def __init__(self) -> None:
        self._grants: dict[RequestKey, EarlyGrant] = {}

    def put(self, early: EarlyGrant) -> bool:
        """Keep a grant. False when there are too many."""
        has_room = len(self._grants) < _MAX_EARLY
        if has_room:
            self._grants[early.grant.handoff.key] = early
        return has_room

    def take(self, key: RequestKey) -> EarlyGrant | None:
        """The grant for this prompt, which does not wait any more."""
        return self._grants.pop(key, None)

    def take_overdue(self, now_s: float) -> list[EarlyGrant]:
        """Grants that no prompt came for."""
        found = [early for early in self._grants.values() if early.deadline_s <= now_s]
        for early in found:
            del self._grants[early.grant.handoff.key]
        return found

    def take_of(self, receiver_epoch: int) -> list[EarlyGrant]:
        """Grants of this life of a receiver: they are void."""
        found = [early for early in self._grants.values() if early.grant.receiver_epoch == receiver_epoch]
        for early in found:
            del self._grants[early.grant.handoff.key]
        return found


@dataclass(frozen=True, slots=True)
class End:
    """How a handoff ended, as `Revoked` tells it (see there)."""

    request_ended: bool = False
    needs_fence: bool = False


class EndedHandoffs:
    """The ends of the last few thousand handoffs."""

    def __init__(self) -> None:
        self._ends: OrderedDict[RequestKey, End] = OrderedDict()

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._ends

    def remember(self, key: RequestKey, end: End | None = None) -> None:
        """A handoff has ended, or will never begin. The first word about it counts."""
        self._ends.setdefault(key, end or End())
        while len(self._ends) > _MAX_ENDED:
            self._ends.popitem(last=False)

    def revoked(self, name: HandoffName, reason: str) -> Revoked:
        """What a receiver is told about this handoff."""
        end = self._ends.get(name.key, End())
        return Revoked(name, reason, end.request_ended, end.needs_fence)
