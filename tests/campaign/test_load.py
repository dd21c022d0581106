"""The campaign's own checks: what is wrong with an answer is seen, and only faults of the router excuse errors."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.campaign import checks, poison
from tests.campaign.corpus import Choice, Entry
from tests.campaign.faults import Happened
from tests.campaign.load import BROKEN, ERROR, FORGOTTEN, WELL, WRONG, Asked, Load
from tests.campaign.schedule import Fault

ENTRY = Entry(0, {"max_tokens": 3}, (Choice([1, 2, 3], [], "abc", "length"),))
FAULT = Fault(0, 0.0, "kill", "decode-0", 1.0, "", 0.0, 0.0)
KILLED_ROUTER = replace(FAULT, kind="router-kill", target="router")


def event(*token_ids: int, text: str = "", finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "token_ids": list(token_ids), "text": text, "finish_reason": finish}]}


WHOLE = [event(1, text="a"), event(2, 3, text="bc", finish="length")]


DONE = b"data: [DONE]\n\n"


async def written(request: web.Request, events: list[dict[str, Any]], end: bytes, ids: str) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for number, each in enumerate(events):
        name = f"id: {ids}.{number}\n" if ids else ""
        await response.write(f"{name}data: {json.dumps(each)}\n\n".encode())
    await response.write(end)
    return response


async def outcome(
    events: list[dict[str, Any]], end: bytes = DONE, modes: tuple[str, ...] = ("stream",), ids: str = ""
) -> Asked:
    """What a client makes of a stream of these events. The rest, from the second event on, is there for "known.0"."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if "stream" not in await request.json():
            return web.json_response({"choices": [event(1, 2, 3, text="abc", finish="length")["choices"][0]]})
        return await written(request, events, end, ids)

    async def rest(request: web.Request) -> web.StreamResponse:
        if request.match_info["id"] != "known.0":
            raise web.HTTPNotFound
        return await written(request, WHOLE[1:], DONE, ids)

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    app.router.add_get("/v1/streams/{id}", rest)
    ended: asyncio.Queue[Asked] = asyncio.Queue()
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        load = Load([ENTRY], session, str(server.make_url("")).rstrip("/"), 1, ended.put_nowait)
        load.start(1)
        while (asked := await ended.get()).mode not in modes:
            pass
        await load.stop()
    return asked


async def test_a_stream_as_its_reference_is_well() -> None:
    asked = await outcome(WHOLE)
    assert (asked.end, asked.message) == (WELL, "")
    assert len(asked.moments_s[0]) == 2


@pytest.mark.parametrize(
    "events",
    [
        [event(1, text="a"), event(9, 3, text="bc", finish="length")],
        [event(1, text="a"), event(1, 2, 3, text="abc", finish="length")],
        [event(1, text="a"), event(3, text="c", finish="length")],
        [event(1, text="a"), event(2, text="b", finish="length")],
        [event(1, text="a"), event(2, 3, text="bx", finish="length")],
        [event(1, text="a"), event(2, 3, text="bc", finish="stop")],
        [event(1, text="a"), event(2, 3, text="bc", finish="length"), event(4, text="d")],
    ],
    ids=["token", "doubled", "lost", "short", "text", "reason", "more"],
)
async def test_an_answer_that_differs_from_its_reference_is_wrong(events: list[dict[str, Any]]) -> None:
    asked = await outcome(events)
    assert asked.end == WRONG
    assert checks.finding_of(asked, [Happened(KILLED_ROUTER, 0.0)]), "nothing excuses it"


async def test_errors_and_broken_streams_are_found_unless_the_router_was_killed() -> None:
    failed = await outcome([WHOLE[0], {"error": {"message": "no"}}], end=b"")
    broken = await outcome(WHOLE, end=b"")
    assert (failed.end, broken.end) == (ERROR, BROKEN)
    for asked in (failed, broken):
        assert checks.finding_of(asked, [Happened(FAULT, asked.begun_s)])
        assert not checks.finding_of(asked, [Happened(KILLED_ROUTER, asked.begun_s, asked.begun_s + 1)])
        assert checks.finding_of(asked, [Happened(KILLED_ROUTER, asked.begun_s - 60, asked.begun_s - 59)])


async def test_a_request_may_be_taken_for_poison_when_enough_nodes_were_killed_meanwhile() -> None:
    refused = {"error": {"message": "nodes were lost again and again as they began to compute this request"}}
    asked = await outcome([WHOLE[0], refused], end=b"")
    now_s = asked.begun_s
    assert not checks.finding_of(asked, [], [], [now_s - 0.5, now_s, now_s])
    assert checks.finding_of(asked, [], [], [now_s - 9, now_s, now_s])
    frozen = Happened(replace(FAULT, kind="freeze", target="prefill-1", link=""), now_s - 0.2)
    cut = Happened(replace(FAULT, kind="cut", target="prefill-1", link="control"), now_s - 0.1, now_s)
    elsewhere = Happened(replace(cut.fault, target="prefill-0"), now_s - 0.1, now_s)
    assert not checks.finding_of(asked, [frozen, cut, cut], [], [now_s, now_s])
    assert checks.finding_of(asked, [frozen, elsewhere], [], [now_s, now_s])
    assert checks.finding_of(asked, [frozen, replace(cut, ended_s=now_s - 0.3)], [], [now_s, now_s])
    other = await outcome([WHOLE[0], {"error": {"message": "no"}}], end=b"")
    assert checks.finding_of(other, [], [], [other.begun_s] * 3)


async def test_a_router_without_threads_may_ask_to_come_back_and_nothing_else() -> None:
    taken = Happened(replace(KILLED_ROUTER, kind="router-threads"), 0.0)
    for message, is_found in (("the server has no memory, thread or file left for this now", False), ("no", True)):
        asked = await outcome([WHOLE[0], {"error": {"message": message}}], end=b"")
        assert bool(checks.finding_of(asked, [taken])) == is_found


async def test_a_stream_that_broke_is_resumed_or_found_unless_there_was_no_room_for_its_journal() -> None:
    resumed = await outcome(WHOLE[:1], b"", ("resume",), ids="known")
    assert (resumed.end, resumed.num_resumed, resumed.message) == (WELL, 1, "")
    forgotten = await outcome(WHOLE[:1], b"", ("resume",), ids="unknown")
    assert forgotten.end == FORGOTTEN
    assert checks.finding_of(forgotten, [Happened(KILLED_ROUTER, forgotten.begun_s)])
    full = replace(KILLED_ROUTER, kind="router-disk-full")
    assert not checks.finding_of(forgotten, [Happened(full, forgotten.begun_s)])
    assert checks.finding_of(forgotten, [Happened(full, forgotten.begun_s - 9, forgotten.begun_s - 1)])


async def test_a_choice_that_stands_still_is_found_though_others_go_on() -> None:
    loop = asyncio.get_running_loop()
    now_s = loop.time()
    asked = Asked(0, ENTRY, "stream", now_s - 100, choices=[Choice(), Choice()], moments_s=[[now_s - 90], [now_s]])
    found: list[str] = []
    watch = asyncio.ensure_future(checks.watch_progress(lambda: [asked], lambda: False, 30.0, found.append))
    async with asyncio.timeout(20):
        while not found:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    watch.cancel()
    assert "no progress for" in found[0]


@pytest.mark.parametrize(
    ("status", "deaths", "is_found"),
    [
        (502, {"p0": [-6, -6], "p1": [-6], "d0": [-9]}, False),
        (200, {}, True),
        (502, {"p0": [-6], "p1": [-6], "d0": [-6], "d1": [-6]}, True),
        (502, {"p0": [-6, -6, -6], "p1": [-6, -6]}, True),
    ],
    ids=["confined", "answered", "four-nodes", "too-often"],
)
def test_a_poison_request_that_kills_more_than_it_may_is_found(
    status: int, deaths: dict[str, list[int]], is_found: bool
) -> None:
    assert bool(poison.finding_of(status, deaths)) == is_found


def test_it_is_told_when_streams_went_on_after_a_frozen_router() -> None:
    thawed = Happened(replace(KILLED_ROUTER, kind="router-freeze"), 1.0, 10.0)
    went_on = Asked(0, ENTRY, "stream", 0.0, ended_s=30.0, moments_s=[[0.5, 12.0], [0.6, 11.0]])
    ended = Asked(1, ENTRY, "stream", 0.0, ended_s=14.0, moments_s=[[0.5]])
    over = Asked(2, ENTRY, "stream", 0.0, ended_s=0.9, moments_s=[[0.5]])
    thaws = checks.after_thaws([went_on, ended, over], [thawed])
    assert [(thaw.late_s, thaw.held_s, thaw.others) for thaw in thaws] == [
        (1.0, 1.0, frozenset()),
        (4.0, 4.0, frozenset()),
    ]
    others = [Happened(FAULT, begun_s, ended_s) for begun_s, ended_s in ((0.1, 0.2), (9.0, 13.5), (15.0, 16.0))]
    (thaw,) = checks.after_thaws([ended], [thawed, *others])
    assert (thaw.late_s, thaw.held_s, thaw.others) == (4.0, 0.5, frozenset({"kill"}))


def test_gaps_are_told_by_the_kind_of_fault_that_fell_into_them() -> None:
    asked = Asked(0, ENTRY, "stream", 0.0, choices=[Choice()], moments_s=[[0.1, 0.2, 3.2, 3.3, 9.0, 20.0, 29.0]])
    later = replace(FAULT, kind="freeze")
    happened = [Happened(FAULT, 1.0, 1.0), Happened(later, 15.0, 16.0), Happened(KILLED_ROUTER, 25.0, 26.0)]
    gaps = checks.gaps_by_kind([asked], happened)
    assert {kind: [round(gap_s, 3) for gap_s in found] for kind, found in gaps.items()} == {
        "kill": [3.0, 5.7],
        "freeze": [11.0],
        "router-kill": [9.0],
    }
