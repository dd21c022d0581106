"""Leases: blocks that something other than a running request holds, each with an owner, a purpose and a deadline.

Owns the deadlines and the order in which they pass. Does not free anything by itself: whoever holds the table asks for
the overdue leases on its own timer and ends them, so a lease never depends on new work to end.

Invariants: an owner holds at most one lease; `overdue` returns every lease whose deadline has passed, in any order of
renewals; times are seconds of one monotonic clock.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Generic, TypeVar

OwnerT = TypeVar("OwnerT")


@dataclass(slots=True)
class Lease(Generic[OwnerT]):
    """`block_ids` held for `owner` until `deadline_s`; `purpose` is for logs and metrics."""

    owner: OwnerT
    purpose: str
    block_ids: list[int]
    deadline_s: float
    _entry: int = field(default=0, repr=False)


class LeaseTable(Generic[OwnerT]):
    """Leases by owner and by deadline."""

    def __init__(self) -> None:
        self._leases: dict[OwnerT, Lease[OwnerT]] = {}
        self._heap: list[tuple[float, int, OwnerT]] = []
        self._num_entries = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, owner: OwnerT) -> bool:
        return owner in self._leases

    def add(self, owner: OwnerT, purpose: str, block_ids: list[int], deadline_s: float) -> Lease[OwnerT]:
        """Begin a lease. Raises `ValueError` when `owner` holds one already."""
        if owner in self._leases:
            raise ValueError(f"{owner!r} already holds a lease")
        lease = self._leases[owner] = Lease(owner, purpose, block_ids, deadline_s)
        self._push(lease)
        return lease

    def get(self, owner: OwnerT) -> Lease[OwnerT] | None:
        """The lease of `owner`, if it holds one."""
        return self._leases.get(owner)

    def all(self) -> list[Lease[OwnerT]]:
        """Every lease, in no particular order."""
        return list(self._leases.values())

    def renew(self, owner: OwnerT, deadline_s: float) -> bool:
        """Move the deadline (never back). False when there is no such lease any more."""
        lease = self._leases.get(owner)
        if lease is None:
            return False
        if deadline_s > lease.deadline_s:
            lease.deadline_s = deadline_s
            self._push(lease)
        return True

    def end(self, owner: OwnerT) -> Lease[OwnerT] | None:
        """Take the lease out of the table; its blocks are now the caller's to release."""
        return self._leases.pop(owner, None)

    def overdue(self, now_s: float) -> list[Lease[OwnerT]]:
        """Every lease whose deadline is at or before `now_s`. They stay in the table until ended."""
        found: list[Lease[OwnerT]] = []
        while self._heap and self._heap[0][0] <= now_s:
            _, entry, owner = heapq.heappop(self._heap)
            lease = self._leases.get(owner)
            if lease is not None and lease._entry == entry:
                found.append(lease)
        for lease in found:
            self._push(lease)
        return found

    def _push(self, lease: Lease[OwnerT]) -> None:
        self._num_entries += 1
        lease._entry = self._num_entries
        heapq.heappush(self._heap, (lease.deadline_s, lease._entry, lease.owner))
