"""Large bodies: off the loop, one at a time, fairly between clients, and bounded in what they hold."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack

import pytest
from aiohttp.test_utils import make_mocked_request

from baton.router.http.serving import bodies as module
from baton.router.http.serving.bodies import MAX_INLINE_BYTES, Bodies, Place
from baton.router.http.serving.limits import HttpLimits
from baton.wire.errors import Overloaded

LARGE = MAX_INLINE_BYTES + 1
LIMITS = HttpLimits(
    max_body_bytes=2 * LARGE, max_held_bytes=5 * LARGE, max_held_bytes_per_client=3 * LARGE, parse_wait_s=0.05
)
PATIENCE_S = 30.0


@pytest.fixture
async def bodies() -> AsyncIterator[Bodies]:
    made = Bodies(LIMITS)
    yield made
    made.close()


def large(bodies: Bodies, client: str, num_bytes: int = LARGE) -> Place:
    place = Place(bodies, client)
    place.add(num_bytes)
    return place


async def test_a_large_body_is_parsed_by_the_one_thread_and_a_small_one_by_the_loop(bodies: Bodies) -> None:
    small = await bodies.parse(large(bodies, "a", MAX_INLINE_BYTES), threading.get_ident)
    threads = {await bodies.parse(large(bodies, name), threading.get_ident) for name in ("a", "b", "c")}
    assert small == threading.get_ident()
    assert len(threads) == 1
    assert small not in threads


async def test_clients_take_turns_whatever_one_of_them_has_sent_before() -> None:
    bodies = Bodies(HttpLimits())
    order: list[str] = []
    may_go = threading.Event()

    def parse(name: str, waits: bool = False) -> Callable[[], None]:
        def run() -> None:
            if waits:
                may_go.wait(PATIENCE_S)
            order.append(name)

        return run

    tasks = [asyncio.create_task(bodies.parse(large(bodies, "flood"), parse("first", waits=True)))]
    tasks += [asyncio.create_task(bodies.parse(large(bodies, "flood"), parse(f"flood {n}"))) for n in range(10)]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(bodies.parse(large(bodies, "other"), parse("other"))))
    await asyncio.sleep(0)
    may_go.set()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*tasks)
    bodies.close()
    assert order.index("other") <= 2


async def test_who_leaves_or_waits_too_long_holds_nobody_up(bodies: Bodies) -> None:
    may_go = threading.Event()
    first = asyncio.create_task(bodies.parse(large(bodies, "a"), lambda: may_go.wait(PATIENCE_S)))
    await asyncio.sleep(0)
    leaving = asyncio.create_task(bodies.parse(large(bodies, "a"), threading.get_ident))
    late = asyncio.create_task(bodies.parse(large(bodies, "b"), threading.get_ident))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(Overloaded):
        await late
    may_go.set()
    async with asyncio.timeout(PATIENCE_S):
        await first
        await bodies.parse(large(bodies, "c"), threading.get_ident)


async def test_who_leaves_in_the_moment_of_its_turn_passes_it_on(
    bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_turn = bodies._end_turn

    def end_and_leave() -> None:
        end_turn()
        leaving.cancel()

    monkeypatch.setattr(bodies, "_end_turn", end_and_leave)
    first = asyncio.create_task(bodies.parse(large(bodies, "a"), threading.get_ident))
    leaving = asyncio.create_task(bodies.parse(large(bodies, "b"), threading.get_ident))
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.wait([first, leaving])
        await bodies.parse(large(bodies, "c"), threading.get_ident)
    assert leaving.cancelled()


async def test_what_is_held_is_bounded_for_each_client_and_in_all(bodies: Bodies) -> None:
    large(bodies, "a", 3 * LARGE)
    with pytest.raises(Overloaded, match=f"{3 * LARGE:,}"):
        large(bodies, "a", 1)
    large(bodies, "b", 2 * LARGE)
    with pytest.raises(Overloaded, match="all clients"):
        large(bodies, "c", 1)


async def test_a_place_gives_back_what_it_held_and_memory_is_returned_soon(
    bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned = threading.Event()
    monkeypatch.setattr(module, "return_freed_memory", returned.set)
    monkeypatch.setattr(module, "_RETURN_MEMORY_AFTER_S", 0.0)
    with ExitStack() as stack:
        place = stack.enter_context(bodies.place(make_mocked_request("POST", "/")))
        place.add(LARGE)
        assert bodies.num_bytes == LARGE
    assert bodies.num_bytes == 0
    assert await asyncio.to_thread(returned.wait, PATIENCE_S)
