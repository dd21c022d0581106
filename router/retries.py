"""How often and when one request is tried again: by the reasons its attempts failed for, not by their number.

A node that was lost is one reason, however many attempts it cost, and none any more when the same life of it comes
back: then only its connection was lost. Every failure that a node reports is a reason of its own. The first attempt
after a quiet time begins at once; failures that follow each other closely wait longer each time, because what broke one
node's connection may break those of the others in the same second. A node that has no room, because other routers use
it too, has refused and not failed: the request goes elsewhere, or asks again until its deadline.
"""

from __future__ import annotations

QUIET_S = 2.0
FIRST_DELAY_S, LAST_DELAY_S = 0.25, 2.0


class Retries:
    """See the module; for one request that may fail for fewer than `max_reasons` reasons. Times are of one clock."""

    def __init__(self, max_reasons: int) -> None:
        self._max_reasons = max_reasons
        self._lost: set[int] = set()
        self._num_failures = 0
        self._num_in_a_row = 0
        self._failed_s: float | None = None

    @property
    def allow_another(self) -> bool:
        """Whether another attempt may begin."""
        return len(self._lost) + self._num_failures < self._max_reasons

    def failed(self, now_s: float, lost_epoch: int | None = None, *, is_refusal: bool = False) -> float:
        """An attempt failed, because that node was lost or because it said so (None); `is_refusal`: it had no room.
        Returns the seconds that another one has to wait."""
        if lost_epoch is None:
            self._num_failures += not is_refusal
        else:
            self._lost.add(lost_epoch)
        is_quiet = self._failed_s is None or now_s - self._failed_s > QUIET_S
        self._failed_s = now_s
        self._num_in_a_row = 0 if is_quiet else self._num_in_a_row + 1
        return min(FIRST_DELAY_S * 2 ** (self._num_in_a_row - 1), LAST_DELAY_S) if self._num_in_a_row else 0.0

    def is_back(self, epoch: int) -> None:
        """A node has joined: if it was lost, it was not dead."""
        self._lost.discard(epoch)
