"""An end of handoffs that several use: each takes the notices of its own, in order."""

from __future__ import annotations

from baton.kvtransfer.commands import Released, SendingNotice
from baton.node.notices import OtherNotices
from tests.node.sharing import Notices
from tests.request_keys import A, B, C


def test_own_notices_are_passed_on_at_once_and_the_others_wait() -> None:
    mailbox = Notices()
    taken: list[SendingNotice] = []
    notices: OtherNotices[SendingNotice] = OtherNotices(mailbox, {B}, taken.append)
    for key in (A, B, C):
        mailbox.put(Released(key))
    notices.sort()
    assert taken == [Released(B)]
    mailbox.put(Released(B))
    assert notices.take() == [Released(A), Released(C)]
    assert notices.take() == []
    assert taken == [Released(B)] * 2
    assert notices.wakeup is mailbox.wakeup
    notices.close()
