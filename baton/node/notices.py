"""The notices of one end of handoffs, where a leg is not the only one that uses it.

Owns which of them has a user of its own, to which they are passed at once. The rest is left for the leg, which takes it
as it would from the mailbox. Order is kept within each part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Generic, Protocol, TypeVar

from baton.kvtransfer.mailbox import Takeable
from baton.wire.request_key import RequestKey


class Notice(Protocol):
    """What an end says of one handoff."""

    @property
    def key(self) -> RequestKey: ...


NoticeT = TypeVar("NoticeT", bound=Notice)


class OtherNotices(Generic[NoticeT]):
    """The notices in `mailbox` but for those whose key is in `own`, which `take_own` gets."""

    def __init__(
        self, mailbox: Takeable[NoticeT], own: Collection[RequestKey], take_own: Callable[[NoticeT], None]
    ) -> None:
        self._mailbox, self._own, self._take_own = mailbox, own, take_own
        self._others: list[NoticeT] = []

    @property
    def wakeup(self) -> Any:
        """What is readable as long as notices may be waiting."""
        return self._mailbox.wakeup

    def sort(self) -> None:
        """Pass on what has an owner, and keep the rest for `take`."""
        for notice in self._mailbox.take():
            if notice.key in self._own:
                self._take_own(notice)
            else:
                self._others.append(notice)

    def take(self) -> list[NoticeT]:
        """Those of nobody else that are waiting, oldest first."""
        self.sort()
        found, self._others = self._others, []
        return found

    def close(self) -> None:
        """Close the mailbox."""
        self._mailbox.close()
