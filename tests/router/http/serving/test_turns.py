"""Requests begin in the order of their arrival, and the loop does other things in between."""

from __future__ import annotations

import asyncio

from baton.router.http.serving.turns import Turns


async def test_a_burst_begins_in_order_and_gives_way() -> None:
    turns = Turns()
    begun: list[int] = []
    seen: list[int] = []

    async def request(number: int) -> None:
        await turns.take()
        begun.append(number)

    async with asyncio.TaskGroup() as group:
        for number in range(100):
            group.create_task(request(number))
        while len(begun) < 100:
            seen.append(len(begun))
            await asyncio.sleep(0)
    assert begun == list(range(100))
    assert len(seen) >= 20


async def test_one_that_leaves_while_it_waits_holds_nobody_up() -> None:
    turns = Turns()
    tasks = [asyncio.create_task(turns.take()) for _ in range(20)]
    await asyncio.sleep(0)
    for task in tasks[4:10]:
        task.cancel()
    async with asyncio.timeout(30):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [result is None for result in results].count(False) <= 6
    async with asyncio.timeout(30):
        await turns.take()
