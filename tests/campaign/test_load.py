"""The campaign's clients: what is wrong with an answer is seen, and only faults of the router excuse errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from tests.campaign import checks, poison
from tests.campaign.answers import Call, Choice
from tests.campaign.corpus import Entry
from tests.campaign.faults import Happened
from tests.campaign.load import BROKEN, CUT, ERROR, FORGOTTEN, RESUME, STREAM, WELL, WHOLE, WRONG, Asked, Load
from tests.campaign.requests import CALLS, CHAT, COMPLETIONS, RESPONSES, TEXT, Request
from tests.campaign.schedule import Fault

Event = dict[str, Any]
BODY = {"model": "m", "prompt": "x", "extra_body": {}}
ENTRY = Entry(0, Request(COMPLETIONS, TEXT, BODY), (Choice([1, 2, 3], [], "abc", "length"),), (1, 3))
FAULT = Fault(0, 0.0, "kill", "decode-0", 1.0, "", 0.0, 0.0)
KILLED_ROUTER = replace(FAULT, kind="router-kill", target="router")
USAGE = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}


def event(*token_ids: int, text: str = "", finish: str | None = None) -> Event:
    return {"choices": [{"index": 0, "token_ids": list(token_ids), "text": text, "finish_reason": finish}]}


TOLD = {"choices": [], "usage": USAGE}
WHOLE_STREAM = [event(1, text="a"), event(2, 3, text="bc", finish="length"), TOLD]
DONE = b"data: [DONE]\n\n"
CALLED = Choice(calls=[Call("", "go", '{"to": 7}')], finish_reason="tool_calls")
CHAT_BODY = {"model": "m", "messages": [], "extra_body": {}}
CALL_ENTRY = Entry(0, Request(CHAT, CALLS, CHAT_BODY), (CALLED,), (1, 3))
RESPONSE_BODY = {"model": "m", "input": "x", "extra_body": {}}
RESPONSE_ENTRY = Entry(
    0, Request(RESPONSES, CALLS, RESPONSE_BODY), (replace(CALLED, finish_reason="completed"),), (1, 3)
)


def call(arguments: str, **more: str) -> Event:
    """A piece of a call in a chat."""
    function = {"arguments": arguments} | ({"name": "go"} if "id" in more else {})
    delta = {"tool_calls": [{"index": 0, "type": "function", "function": function, **more}]}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


ENDED_BY_CALL = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}], "usage": USAGE}


def response(call_id: str = "a", arguments: str = '{"to": 7}') -> list[Event]:
    """The events of a response that is a call."""
    item: Event = {"type": "function_call", "call_id": "a", "name": "go"}
    usage = {"input_tokens": 1, "output_tokens": 3}
    output = [{**item, "call_id": call_id, "arguments": arguments}]
    ended: Event = {"object": "response", "status": "completed", "output": output, "usage": usage}
    events: list[Event] = [
        {"type": "response.output_item.added", "item": {**item, "arguments": ""}},
        {"type": "response.function_call_arguments.delta", "delta": '{"to": 7}'},
        {"type": "response.completed", "response": ended},
    ]
    return [{"sequence_number": number, **each} for number, each in enumerate(events)]


def written(events: Sequence[Event], end: bytes, ids: str, after: int = 0) -> web.Response:
    """The events behind number `after`, with ids."""
    text = b""
    for number, each in enumerate(events[after:], after + 1):
        name = f"id: {ids}.{number}\n" if ids else ""
        text += f"{name}data: {json.dumps(each)}\n\n".encode()
    return web.Response(body=text + end, content_type="text/event-stream")


async def outcome(
    events: Sequence[Event],
    end: bytes = DONE,
    mode: str = STREAM,
    ids: str = "",
    entry: Entry = ENTRY,
    again: Sequence[Event] = WHOLE_STREAM,
    seed: int = 0,
) -> Asked:
    """What a client makes of a stream of these events, and of `again` when it asks for a stream with the id "known"."""

    def rest(last_id: str) -> web.Response:
        name, _, number = last_id.rpartition(".")
        if name != "known":
            raise web.HTTPNotFound
        return written(again, DONE, ids, int(number))

    async def answer(request: web.Request) -> web.Response:
        if last_id := request.headers.get("Last-Event-ID"):
            return rest(last_id)
        if "stream" not in await request.json():
            return web.json_response({**event(1, 2, 3, text="abc", finish="length"), "usage": USAGE})
        return written(events, end, ids)

    async def by_id(request: web.Request) -> web.Response:
        return rest(request.match_info["id"])

    app = web.Application()
    for path in ("completions", "chat/completions", "responses"):
        app.router.add_post(f"/v1/{path}", answer)
    app.router.add_get("/v1/streams/{id}", by_id)
    plain = DefaultAsyncHttpxClient(verify=False)  # reading the authorities' certificates takes 50 ms
    async with TestServer(app) as server, plain:
        client = AsyncOpenAI(base_url=f"{server.make_url('/v1')}", api_key="x", http_client=plain)
        load = Load([entry], client.with_options(max_retries=0), 1, lambda asked: None)
        return await load.ask(entry, mode, seed)


async def test_a_stream_as_its_reference_is_well() -> None:
    asked = await outcome(WHOLE_STREAM)
    assert (asked.end, asked.message) == (WELL, "")
    assert len(asked.moments_s[0]) == 2
    assert (await outcome([], mode=WHOLE)).end == WELL


@pytest.mark.parametrize(
    "events",
    [
        [event(1, text="a"), event(9, 3, text="bc", finish="length"), TOLD],
        [event(1, text="a"), event(1, 2, 3, text="abc", finish="length"), TOLD],
        [event(1, text="a"), event(3, text="c", finish="length"), TOLD],
        [event(1, text="a"), event(2, text="b", finish="length"), TOLD],
        [event(1, text="a"), event(2, 3, text="bx", finish="length"), TOLD],
        [event(1, text="a"), event(2, 3, text="bc", finish="stop"), TOLD],
        [event(1, text="a"), event(2, 3, text="bc", finish="length"), event(4, text="d"), TOLD],
        [*WHOLE_STREAM[:2], {"choices": [], "usage": USAGE | {"completion_tokens": 4}}],
        [{"choices": [{"index": 1, "text": "", "finish_reason": None}]}],
        [{"choices": [{"text": ""}]}],
    ],
    ids=["token", "doubled", "lost", "short", "text", "reason", "more", "usage", "index", "member"],
)
async def test_an_answer_that_differs_from_its_reference_is_wrong(events: list[Event]) -> None:
    asked = await outcome(events)
    assert asked.end == WRONG
    assert checks.finding_of(asked, [Happened(KILLED_ROUTER, 0.0)]), "nothing excuses it"


@pytest.mark.parametrize(
    ("events", "end"),
    [
        ([call('{"to"', id="a"), call(": 7}"), ENDED_BY_CALL], WELL),
        ([call('{"to"', id="a"), call(": 8}"), ENDED_BY_CALL], WRONG),
        ([call('{"to"'), call(": 7}"), ENDED_BY_CALL], WRONG),
        ([call('{"to"', id="a"), call(": 7}", id="b"), ENDED_BY_CALL], WRONG),
        ([call('{"to"', id="a"), ENDED_BY_CALL], WRONG),
    ],
    ids=["well", "argument", "no-id", "another-id", "short"],
)
async def test_calls_in_a_chat_keep_their_id_and_have_the_right_arguments(events: list[Event], end: str) -> None:
    assert (await outcome(events, entry=CALL_ENTRY)).end == end


@pytest.mark.parametrize(
    ("events", "end"),
    [
        (response(), WELL),
        (response(call_id="b"), WRONG),
        (response(arguments="{}"), WRONG),
        ([*response()[:1], *response()[2:]], WRONG),
        ([*response()[:2], {"type": "response.failed", "sequence_number": 2}], ERROR),
        (response()[:2], BROKEN),
    ],
    ids=["well", "id", "arguments", "number", "failed", "cut"],
)
async def test_a_response_ends_with_what_its_events_said(events: list[Event], end: str) -> None:
    assert (await outcome(events, end=b"", entry=RESPONSE_ENTRY)).end == end


async def test_errors_and_broken_streams_are_found_unless_the_router_was_killed() -> None:
    failed = await outcome([WHOLE_STREAM[0], {"error": {"message": "no"}}], end=b"")
    broken = await outcome(WHOLE_STREAM[:2], end=b"")
    assert (failed.end, broken.end) == (ERROR, BROKEN)
    for asked in (failed, broken):
        assert checks.finding_of(asked, [Happened(FAULT, asked.begun_s)])
        assert not checks.finding_of(asked, [Happened(KILLED_ROUTER, asked.begun_s, asked.begun_s + 1)])
        assert checks.finding_of(asked, [Happened(KILLED_ROUTER, asked.begun_s - 60, asked.begun_s - 59)])


async def test_a_request_may_be_taken_for_poison_when_enough_nodes_were_killed_meanwhile() -> None:
    refused = {"error": {"message": "nodes were lost again and again as they began to compute this request"}}
    asked = await outcome([WHOLE_STREAM[0], refused], end=b"")
    now_s = asked.begun_s
    assert not checks.finding_of(asked, [], [], [now_s - 0.5, now_s, now_s])
    assert checks.finding_of(asked, [], [], [now_s - 9, now_s, now_s])
    frozen = Happened(replace(FAULT, kind="freeze", target="prefill-1", link=""), now_s - 0.2)
    cut = Happened(replace(FAULT, kind="cut", target="prefill-1", link="control"), now_s - 0.1, now_s)
    elsewhere = Happened(replace(cut.fault, target="prefill-0"), now_s - 0.1, now_s)
    assert not checks.finding_of(asked, [frozen, cut, cut], [], [now_s, now_s])
    assert checks.finding_of(asked, [frozen, elsewhere], [], [now_s, now_s])
    assert checks.finding_of(asked, [frozen, replace(cut, ended_s=now_s - 0.3)], [], [now_s, now_s])
    other = await outcome([WHOLE_STREAM[0], {"error": {"message": "no"}}], end=b"")
    assert checks.finding_of(other, [], [], [other.begun_s] * 3)


async def test_a_router_without_threads_may_ask_to_come_back_and_nothing_else() -> None:
    taken = Happened(replace(KILLED_ROUTER, kind="router-threads"), 0.0)
    for message, is_found in (("the server has no memory, thread or file left for this now", False), ("no", True)):
        asked = await outcome([WHOLE_STREAM[0], {"error": {"message": message}}], end=b"")
        assert bool(checks.finding_of(asked, [taken])) == is_found


async def test_a_stream_that_broke_is_resumed_or_found_unless_there_was_no_room_for_its_journal() -> None:
    resumed = await outcome(WHOLE_STREAM[:1], b"", RESUME, ids="known")
    assert (resumed.end, resumed.num_resumed, resumed.message) == (WELL, 1, "")
    forgotten = await outcome(WHOLE_STREAM[:1], b"", RESUME, ids="unknown")
    assert forgotten.end == FORGOTTEN
    assert checks.finding_of(forgotten, [Happened(KILLED_ROUTER, forgotten.begun_s)])
    full = replace(KILLED_ROUTER, kind="router-disk-full")
    assert not checks.finding_of(forgotten, [Happened(full, forgotten.begun_s)])
    assert checks.finding_of(forgotten, [Happened(full, forgotten.begun_s - 9, forgotten.begun_s - 1)])


@pytest.mark.parametrize("entry", [ENTRY, CALL_ENTRY, RESPONSE_ENTRY], ids=["completion", "chat", "response"])
async def test_what_a_client_is_told_again_has_to_be_the_same_to_the_letter(entry: Entry) -> None:
    events: Sequence[Event] = {
        COMPLETIONS: [event(1, text="a"), event(2, text="b"), event(3, text="c", finish="length"), TOLD],
        CHAT: [call("", id="a"), *map(call, '{"to": 7}'), ENDED_BY_CALL],
        RESPONSES: response(),
    }[entry.request.api]
    for changed in (False, True):
        again = [{**each, "created": 7} if changed else each for each in events]
        found = [await outcome(events, b"", CUT, "known", entry, again, seed) for seed in range(3)]
        assert all(asked.num_resumed for asked in found)
        told_again = [asked for asked in found if asked.num_told_again]
        assert told_again
        assert {asked.end for asked in told_again} == {WRONG if changed else WELL}


async def test_a_choice_that_stands_still_is_found_though_others_go_on() -> None:
    loop = asyncio.get_running_loop()
    now_s = loop.time()
    asked = Asked(0, ENTRY, STREAM, now_s - 100, choices=[Choice(), Choice()], moments_s=[[now_s - 90], [now_s]])
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
    went_on = Asked(0, ENTRY, STREAM, 0.0, ended_s=30.0, moments_s=[[0.5, 12.0], [0.6, 11.0]])
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
    asked = Asked(0, ENTRY, STREAM, 0.0, choices=[Choice()], moments_s=[[0.1, 0.2, 3.2, 3.3, 9.0, 20.0, 29.0]])
    later = replace(FAULT, kind="freeze")
    happened = [Happened(FAULT, 1.0, 1.0), Happened(later, 15.0, 16.0), Happened(KILLED_ROUTER, 25.0, 26.0)]
    gaps = checks.gaps_by_kind([asked], happened)
    assert {kind: [round(gap_s, 3) for gap_s in found] for kind, found in gaps.items()} == {
        "kill": [3.0, 5.7],
        "freeze": [11.0],
        "router-kill": [9.0],
    }
