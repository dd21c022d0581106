"""Deliveries of several requests reach the taker together and in order, and the error comes after them."""

from __future__ import annotations

import asyncio

import pytest

from baton.router.requests.inbox import Inbox
from baton.router.requests.output import Delivery
from baton.wire.errors import DeadlineExceeded, NoNode


def _delivery(*token_ids: int) -> Delivery:
    return Delivery(token_ids, (), "")


async def test_what_came_meanwhile_is_taken_together_and_in_order() -> None:
    inbox = Inbox()
    inbox.put(0, _delivery(1))
    inbox.put(1, _delivery(2))
    inbox.put(0, _delivery(3))
    assert await inbox.take() == [(0, _delivery(1)), (1, _delivery(2)), (0, _delivery(3))]


async def test_a_taker_waits_for_the_next() -> None:
    inbox = Inbox()
    waiting = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    inbox.put(0, _delivery(1))
    inbox.put(0, _delivery(2))
    assert await waiting == [(0, _delivery(1)), (0, _delivery(2))]


async def test_the_first_error_comes_after_everything_else() -> None:
    inbox = Inbox()
    inbox.put(0, _delivery(1))
    inbox.fail(NoNode("first"))
    inbox.fail(DeadlineExceeded("second"))
    assert await inbox.take() == [(0, _delivery(1))]
    for _ in range(2):
        with pytest.raises(NoNode, match="first"):
            await inbox.take()


async def test_an_error_wakes_the_taker() -> None:
    inbox = Inbox()
    waiting = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    inbox.fail(NoNode("gone"))
    with pytest.raises(NoNode):
        await waiting


async def test_a_slow_taker_lets_other_tasks_run() -> None:
    inbox = Inbox()
    for number in range(1000):
        inbox.put(0, _delivery(number))
    num_turns = 0

    async def other() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    token_ids: list[int] = []
    num_takes = 0
    while len(token_ids) < 1000:
        token_ids += [delivery.token_ids[0] for _, delivery in await inbox.take()]
        num_takes += 1
    task.cancel()
    assert token_ids == [*range(1000)]
    assert num_takes > 10
    assert num_turns >= num_takes


async def test_a_taker_that_was_cancelled_has_lost_nothing() -> None:
    inbox = Inbox()
    waiting = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    waiting.cancel()
    inbox.put(0, _delivery(1))
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await inbox.take() == [(0, _delivery(1))]
