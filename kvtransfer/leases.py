"""Leases: the deadlines until which blocks are held for handoffs.

Owns the deadlines and the order in which they pass. Releases nothing by itself: the side that owns the table asks for
the overdue owners on its own timer and ends them, so a lease expires even when no new work comes.

Invariants: an owner holds at most one lease; `overdue` returns every owner whose deadline has passed, whatever the
order of renewals; times are seconds of one monotonic clock.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

OwnerT = TypeVar("OwnerT")


class LeaseTable(Generic[OwnerT]):
    """Deadlines by owner, and in the order in which they pass.

    The heap holds one entry per owner, or a few. A renewal only stores the new deadline in a dictionary; when the old
    entry comes up, the owner is pushed again. An overdue lease never waits behind a renewed one.
    """

    def __init__(self) -> None:
        self._deadlines_s: dict[OwnerT, float] = {}
        self._heap: list[tuple[float, int, OwnerT]] = []
        self._num_entries = 0

    def __len__(self) -> int:
        return len(self._deadlines_s)

    def __contains__(self, owner: OwnerT) -> bool:
        return owner in self._deadlines_s

    def begin(self, owner: OwnerT, deadline_s: float) -> None:
        """Begin a lease. Raises `ValueError` when `owner` holds one already."""
        if owner in self._deadlines_s:
            raise ValueError(f"{owner!r} already holds a lease")
        self._deadlines_s[owner] = deadline_s
        self._push(owner, deadline_s)

    def renew(self, owner: OwnerT, deadline_s: float) -> bool:
        """Move the deadline, but never back. Returns False when there is no such lease."""
        current_s = self._deadlines_s.get(owner)
        if current_s is None:
            return False
        self._deadlines_s[owner] = max(current_s, deadline_s)
        return True

    def end(self, owner: OwnerT) -> bool:
        """Remove the lease. Returns False when there was none."""
        return self._deadlines_s.pop(owner, None) is not None

    def overdue(self, now_s: float) -> list[OwnerT]:
        """Every owner whose deadline is at or before `now_s`. They stay in the table until ended or renewed."""
        found: dict[OwnerT, None] = {}
        while self._heap and self._heap[0][0] <= now_s:
            owner = heapq.heappop(self._heap)[2]
            deadline_s = self._deadlines_s.get(owner)
            if deadline_s is None or owner in found:
                continue
            if deadline_s <= now_s:
                found[owner] = None
            else:
                self._push(owner, deadline_s)
        for owner in found:
            self._push(owner, self._deadlines_s[owner])
        return list(found)

    def _push(self, owner: OwnerT, deadline_s: float) -> None:
        self._num_entries += 1
        heapq.heappush(self._heap, (deadline_s, self._num_entries, owner))
