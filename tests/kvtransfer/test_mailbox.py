from __future__ import annotations

import select
import threading

import pytest

from baton.kvtransfer.mailbox import Mailbox


def is_readable(mailbox: Mailbox[int], timeout_s: float = 0.0) -> bool:
    return bool(select.select([mailbox.wakeup], [], [], timeout_s)[0])


def test_items_come_in_order_and_wake_the_taker_once() -> None:
    mailbox: Mailbox[int] = Mailbox()
    assert not is_readable(mailbox)
    for number in range(1000):
        mailbox.put(number)
    assert is_readable(mailbox)
    assert mailbox.take() == list(range(1000))
    assert not is_readable(mailbox)
    assert mailbox.take() == []
    mailbox.close()


def test_a_wake_up_needs_no_item() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.wake()
    assert is_readable(mailbox)
    assert mailbox.take() == []
    assert not is_readable(mailbox)
    mailbox.close()


def test_nothing_is_lost_and_nothing_left_readable_between_threads() -> None:
    mailbox: Mailbox[int] = Mailbox()
    num_items = 20_000
    found: list[int] = []

    def put_every_fourth(first: int) -> None:
        for number in range(first, num_items, 4):
            mailbox.put(number)

    putters = [threading.Thread(target=put_every_fourth, args=(first,)) for first in range(4)]
    for putter in putters:
        putter.start()
    while len(found) < num_items:
        assert is_readable(mailbox, 5.0), "items are waiting but the socket is not readable"
        found += mailbox.take()
    for putter in putters:
        putter.join()
    mailbox.take()
    assert not is_readable(mailbox)
    assert sorted(found) == list(range(num_items))
    mailbox.close()


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_closed_mailbox_takes_items_without_harm(is_taken: bool) -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.close()
    mailbox.put(1)
    assert not is_taken or mailbox.take() == [1]
