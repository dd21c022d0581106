"""Admission: what runs at once, what waits, what is refused, and that nothing leaks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.router.http.access.account import Account
from baton.router.http.access.identity import Identity
from baton.router.http.access.keys import ApiKey
from baton.router.http.admission.admission import (
    QUEUE_FULL,
    QUEUE_TIMEOUT,
    SHUTTING_DOWN,
    TOO_LARGE,
    Admission,
    AdmissionSettings,
    Demand,
    Permit,
)
from baton.wire.errors import InvalidRequest, Overloaded, RateLimited


class Desk:
    """An admission with a clock and a capacity that the test sets."""

    def __init__(self, **settings: Any) -> None:
        limits = {"max_concurrent_requests": 4, "max_queued_requests": 10, "max_queued_tokens": 10_000}
        self.now_s = 50.0
        self.capacity = 10**6
        self.admission = Admission(
            AdmissionSettings(**({**limits, "max_queue_s": 60.0} | settings)),
            lambda: self.capacity,
            lambda: self.now_s,
        )

    def at_once(self, demand: Demand) -> Permit:
        """What must not wait: one step of the coroutine is its end."""
        with pytest.raises(StopIteration) as ended:
            self.admission.admit(demand).send(None)
        permit: Permit = ended.value.value
        return permit

    async def waiting(self, demand: Demand) -> asyncio.Task[Permit]:
        """A request that has to wait."""
        number = self.admission.num_waiting
        task = asyncio.create_task(self.admission.admit(demand))
        while self.admission.num_waiting == number:
            assert not task.done()
            await asyncio.sleep(0)
        return task

    def is_empty(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return (self.admission.num_running, self.admission.num_waiting) == (0, 0)


def _demand(num_tokens: int = 100, num_choices: int = 1, who: Identity | None = None, priority: int = 0) -> Demand:
    return Demand(who, num_choices, num_tokens, priority)


def _key(name: str, **limits: Any) -> Identity:
    return Identity(name, b"r" * 32, Account(ApiKey("0" * 64, **limits)))


async def _result(task: asyncio.Task[Permit]) -> Permit:
    async with asyncio.timeout(30):
        return await task


async def test_with_room_nothing_waits_not_even_for_the_loop() -> None:
    desk = Desk()
    permits = [desk.at_once(_demand(num_choices=2)) for _ in range(2)]
    assert (desk.admission.num_running, [permit.waited_s for permit in permits]) == (4, [0.0, 0.0])
    for permit in permits * 2:  # closing twice is harmless
        permit.close(1, 1)
    assert desk.is_empty()


async def test_a_request_waits_for_room_and_is_told_how_long() -> None:
    desk = Desk(max_concurrent_requests=1)
    first = desk.at_once(_demand())
    second = await desk.waiting(_demand())
    desk.now_s += 7
    first.close(1, 1)
    permit = await _result(second)
    assert (permit.waited_s, desk.admission.num_running) == (7.0, 1)
    permit.close(1, 1)
    assert desk.is_empty()


async def test_nobody_overtakes_those_who_wait() -> None:
    desk = Desk(max_concurrent_requests=4)
    first = desk.at_once(_demand(num_choices=3))
    large = await desk.waiting(_demand(num_choices=2))
    small = await desk.waiting(_demand(num_choices=1))  # there is room for it
    first.close(1, 1)
    for task in (large, small):
        (await _result(task)).close(1, 1)
    assert desk.is_empty()


async def test_beyond_what_nodes_have_use_for_requests_wait_until_nodes_join() -> None:
    desk = Desk()
    desk.capacity = 1
    many = desk.at_once(_demand(num_choices=3))  # it need not wait until the nodes are idle
    waiting = await desk.waiting(_demand())
    desk.capacity = 4
    desk.admission.fill()
    (await _result(waiting)).close(1, 1)
    many.close(1, 1)
    assert desk.is_empty()


async def test_the_queue_is_bounded_in_requests_and_tokens() -> None:
    desk = Desk(max_concurrent_requests=1, max_queued_requests=2, max_queued_tokens=1000)
    running = desk.at_once(_demand())
    tasks = [await desk.waiting(_demand(500))]
    with pytest.raises(Overloaded):
        await desk.admission.admit(_demand(501))
    tasks.append(await desk.waiting(_demand(500)))
    with pytest.raises(Overloaded):
        await desk.admission.admit(_demand(0))
    assert desk.admission.rejected == {QUEUE_FULL: 2}
    running.close(1, 1)
    for task in tasks:
        (await _result(task)).close(1, 1)
    assert desk.is_empty()


async def test_a_wait_has_an_end() -> None:
    desk = Desk(max_concurrent_requests=1, max_queue_s=0.02)
    running = desk.at_once(_demand())
    with pytest.raises(Overloaded, match="waited"):
        await _result(await desk.waiting(_demand()))
    assert desk.admission.rejected == {QUEUE_TIMEOUT: 1}
    running.close(1, 1)
    assert desk.is_empty()


async def test_a_client_that_leaves_the_queue_is_out_of_it_at_once() -> None:
    desk = Desk(max_concurrent_requests=1)
    running = desk.at_once(_demand())
    leaving, staying = await desk.waiting(_demand()), await desk.waiting(_demand())
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert desk.admission.num_waiting == 1
    running.close(1, 1)
    (await _result(staying)).close(1, 1)
    assert desk.is_empty()


@pytest.mark.parametrize("leaves_first", [True, False])
async def test_a_client_that_leaves_at_the_moment_of_its_turn_takes_no_room(leaves_first: bool) -> None:
    desk = Desk(max_concurrent_requests=1)
    running = desk.at_once(_demand())
    leaving, staying = await desk.waiting(_demand()), await desk.waiting(_demand())
    if leaves_first:
        leaving.cancel()
    running.close(1, 1)
    if not leaves_first:
        leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert leaving.cancelled()
    (await _result(staying)).close(1, 1)
    assert desk.is_empty()


async def test_when_a_large_request_leaves_smaller_ones_behind_it_run() -> None:
    desk = Desk(max_concurrent_requests=4)
    running = desk.at_once(_demand(num_choices=3))
    large, small = await desk.waiting(_demand(num_choices=4)), await desk.waiting(_demand())
    large.cancel()
    (await _result(small)).close(1, 1)
    running.close(1, 1)
    assert desk.is_empty()


async def test_what_can_never_run_is_refused_at_once() -> None:
    desk = Desk()
    with pytest.raises(InvalidRequest):
        await desk.admission.admit(_demand(num_choices=5))
    with pytest.raises(InvalidRequest):
        await desk.admission.admit(_demand(101, who=_key("alice", tokens_per_minute=100)))
    assert desk.admission.rejected == {TOO_LARGE: 2}
    assert desk.is_empty()


async def test_a_key_is_charged_at_its_admission_and_corrected_at_the_end() -> None:
    desk = Desk()
    alice = _key("alice", tokens_per_minute=1000)
    permit = desk.at_once(_demand(800, who=alice))
    with pytest.raises(RateLimited) as caught:
        await desk.admission.admit(_demand(800, who=alice))
    assert 30 <= caught.value.retry_after_s <= 36
    assert desk.admission.rejected == {"tokens_per_minute": 1}
    permit.close(num_prompt_tokens=30, num_generated_tokens=20)
    desk.at_once(_demand(800, who=alice)).close(0, 0)
    assert (alice.account.num_prompt_tokens, alice.account.num_generated_tokens) == (30, 20)


async def test_a_request_that_never_runs_costs_its_key_nothing() -> None:
    desk = Desk(max_concurrent_requests=1, max_queued_requests=1)
    alice = _key("alice", tokens_per_minute=100)
    running = desk.at_once(_demand())
    leaving = await desk.waiting(_demand(100, who=alice))
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    blocking = await desk.waiting(_demand())
    with pytest.raises(Overloaded):
        await desk.admission.admit(_demand(100, who=alice))
    running.close(1, 1)
    (await _result(blocking)).close(1, 1)
    desk.at_once(_demand(100, who=alice)).close(1, 1)


async def test_keys_take_turns() -> None:
    desk = Desk(max_concurrent_requests=1, max_queued_requests=100, max_queued_tokens=10**6)
    alice, bob = _key("alice"), _key("bob")
    running = desk.at_once(_demand())
    order: list[str] = []

    async def one(who: Identity) -> None:
        permit = await desk.admission.admit(_demand(1024, who=who))
        order.append(who.name)
        permit.close(1, 1)

    async with asyncio.TaskGroup() as tasks:
        for who in (*[alice] * 20, *[bob] * 5):
            tasks.create_task(one(who))
        while desk.admission.num_waiting < 25:  # noqa: ASYNC110
            await asyncio.sleep(0)
        running.close(1, 1)
    assert order[:10].count("bob") == 5
    assert desk.is_empty()


async def test_a_refusal_says_when_there_will_be_room_by_the_speed_that_was_measured() -> None:
    desk = Desk(max_concurrent_requests=1, max_queued_requests=3)
    permit = desk.at_once(_demand())
    tasks = [await desk.waiting(_demand()) for _ in range(3)]
    with pytest.raises(Overloaded) as guessed:
        await desk.admission.admit(_demand())
    assert guessed.value.retry_after_s == 1  # nothing was measured
    for _ in range(2):
        desk.now_s += 10
        permit.close(1, 1)
        permit = await _result(tasks.pop(0))
        tasks.append(await desk.waiting(_demand()))
    with pytest.raises(Overloaded) as measured:
        await desk.admission.admit(_demand())
    assert 35 <= measured.value.retry_after_s <= 45  # 4 requests, one in 10 s
    permit.close(1, 1)
    for task in tasks:
        (await _result(task)).close(1, 1)
    assert desk.is_empty()


async def test_a_wait_that_would_be_too_long_is_not_begun() -> None:
    desk = Desk(max_concurrent_requests=1, max_queue_s=30)
    permit = desk.at_once(_demand())
    task = await desk.waiting(_demand())
    desk.now_s += 20
    permit.close(1, 1)
    permit = await _result(task)
    task = await desk.waiting(_demand())  # 20 s
    with pytest.raises(Overloaded) as caught:
        await desk.admission.admit(_demand())
    assert 39 <= caught.value.retry_after_s <= 41
    permit.close(1, 1)
    (await _result(task)).close(1, 1)


async def test_time_in_which_nothing_waits_is_no_slowness() -> None:
    desk = Desk(max_concurrent_requests=1)
    permit = desk.at_once(_demand())
    task = await desk.waiting(_demand())
    desk.now_s += 2
    permit.close(1, 1)
    permit = await _result(task)
    desk.now_s += 10_000  # the last one runs for hours, and nobody waits
    task = await desk.waiting(_demand())
    with pytest.raises(Overloaded) as caught:
        await desk.admission.admit(_demand(10_000))
    assert caught.value.retry_after_s == 202
    permit.close(1, 1)
    (await _result(task)).close(1, 1)


async def test_a_shutdown_ends_all_waiting() -> None:
    desk = Desk(max_concurrent_requests=1)
    running = desk.at_once(_demand())
    tasks = [await desk.waiting(_demand()) for _ in range(3)]
    desk.admission.close()
    for task in tasks:
        with pytest.raises(Overloaded, match="shutting down"):
            await _result(task)
    with pytest.raises(Overloaded, match="shutting down"):
        await desk.admission.admit(_demand())
    assert desk.admission.rejected == {SHUTTING_DOWN: 4}
    running.close(1, 1)
    assert desk.is_empty()
