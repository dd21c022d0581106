"""Where ranks that are threads of the test find each other."""

from __future__ import annotations

import threading

from baton.ranks.executor.meeting import Meeting
from baton.ranks.executor.messages import Posted

_WAIT_S = 30.0


class Board:
    """What was posted, of all groups."""

    def __init__(self) -> None:
        self._posted: dict[tuple[str, str], bytes] = {}
        self._news = threading.Condition()

    def meeting(self, group: str = "stage 0") -> Meeting:
        """The store of a group."""
        return Meeting(group, self._post, self._await)

    def _post(self, posted: Posted) -> None:
        with self._news:
            self._posted[posted.group, posted.key] = posted.value
            self._news.notify_all()

    def _await(self, group: str, key: str) -> bytes:
        with self._news:
            assert self._news.wait_for(lambda: (group, key) in self._posted, _WAIT_S)
            return self._posted[group, key]
