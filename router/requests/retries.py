"""How often and when one request is tried again: by the reasons its attempts failed for, not by their number.

A node that was lost is one reason, however many attempts it cost, and none any more when the same life of it comes
back: then only its connection was lost. Every failure that a node reports is a reason of its own, but two handoffs that
fail are one: what is wrong between two nodes, such as a transport that is away for longer than a lease, fails the next
handoff too, and behind the second the decode node computes the prompt itself. The first attempt after a quiet time
begins at once; failures that follow each other closely wait longer each time, because what broke one node's connection
may break those of the others in the same second. A node that has no room, because other routers use it too, has refused
and not failed: the request goes elsewhere, or asks again until its deadline.
"""

from __future__ import annotations

from baton.wire.errors import BatonError, Overloaded, RequestFailed, TransferFailed

QUIET_S = 2.0
FIRST_DELAY_S, LAST_DELAY_S = 0.25, 2.0


class Retries:
    """See the module; for one request that may fail for fewer than `max_reasons` reasons. Times are of one clock."""

    def __init__(self, max_reasons: int) -> None:
        self._max_reasons = max_reasons
        self._lost: set[int] = set()
        self._num_failures = 0
        self._has_failed_handoff = False
        self._num_in_a_row = 0
        self._failed_s: float | None = None

    @property
    def allow_another(self) -> bool:
        """Whether another attempt may begin."""
        return len(self._lost) + self._num_failures < self._max_reasons

    def failed(self, now_s: float, error: BatonError, lost_epoch: int | None = None) -> float:
        """An attempt failed, because that node was lost, or with what a node has said (None). Returns the seconds that
        another one has to wait."""
        is_handoff = isinstance(error, RequestFailed) and error.cause_code == TransferFailed.code
        if lost_epoch is not None:
            self._lost.add(lost_epoch)
        elif not isinstance(error, Overloaded):
            self._num_failures += not (is_handoff and self._has_failed_handoff)
            self._has_failed_handoff ^= is_handoff
        is_quiet = self._failed_s is None or now_s - self._failed_s > QUIET_S
        self._failed_s = now_s
        self._num_in_a_row = 0 if is_quiet else self._num_in_a_row + 1
        return min(FIRST_DELAY_S * 2 ** (self._num_in_a_row - 1), LAST_DELAY_S) if self._num_in_a_row else 0.0

    def is_back(self, epoch: int) -> None:
        """A node has joined: if it was lost, it was not dead."""
        self._lost.discard(epoch)
