"""The page at `/`: who may see what, what is seen of the relay, and that it costs nothing while nobody looks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.router.http.access.guard import Guard
from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.page.last_ends import NUM_ENDED, NUM_FAILURES, LastEnds
from baton.router.http.page.relay_view import MAX_COUNTED, MAX_ROWS, RelayView
from baton.router.http.page.rows import failure_row, leg_of, request_row
from baton.router.http.page.serving import EVENTS_PATH, MAX_WATCHERS
from baton.router.http.request_log import RequestLog
from baton.router.requests.timings import RelayTimes
from baton.router.requests.trace import CANCELLED, FlightTrace, RequestTrace
from baton.router.settings import RouterSettings
from baton.runtime.clock import now_us
from baton.wire.messages.legs import Decode, Prefill
from baton.wire.messages.output import StepTimes
from tests.router.fake_node import FakeNode, LegMessage, answering
from tests.router.http_client import Connection, chat_body, connected, fetch, post_completion, request_bytes
from tests.router.rig import MODEL, Server, serving

SECRET = "canary-of-the-prompt"
KEY = "key-of-the-page"
PATHS = ("/", "/page/files/main.js", "/page/files/style.css")


@pytest.fixture
async def server(prompts: PromptMaker) -> AsyncIterator[Server]:
    async with serving(prompts) as running:
        yield running


@asynccontextmanager
async def watching(server: Server, headers: dict[str, str] | None = None) -> AsyncIterator[Connection]:
    """A connection on which the stream of events has been asked for."""
    async with connected(server) as connection:
        await connection.send(request_bytes("GET", EVENTS_PATH, headers=headers))
        yield connection


async def next_document(connection: Connection) -> dict[str, Any]:
    """The next event of a stream. Chunks of a watcher are whole events."""
    await connection.until(b"}\n\n\r\n")
    event, _, rest = bytes(connection.received).partition(b"}\n\n\r\n")
    connection.received[:] = rest
    found: dict[str, Any] = json.loads(event[event.index(b"data: ") + 6 :] + b"}")
    return found


async def document_with(connection: Connection, member: str) -> dict[str, Any]:
    """The next document in which this list is not empty."""
    while not (document := await next_document(connection))[member]:
        pass
    return document


def _page_of(server: Server) -> Any:
    assert server.app is not None
    route = next(
        each for each in server.app.router.routes() if each.resource and each.resource.canonical == EVENTS_PATH
    )
    return getattr(route.handler, "__self__", None)


async def test_the_page_can_be_switched_off(prompts: PromptMaker) -> None:
    async with serving(prompts, router_settings=RouterSettings(no_page=True)) as server:
        for path in (*PATHS, EVENTS_PATH):
            assert (await fetch(server, "GET", path)).status == 404


async def test_with_keys_the_files_are_open_and_the_events_are_not(prompts: PromptMaker) -> None:
    async with serving(prompts, guard=Guard(None, KEY, b"s" * 32)) as server:
        for path in PATHS:
            assert (await fetch(server, "GET", path)).status == 200
        for headers in ({}, {"authorization": "Bearer other"}):
            assert (await fetch(server, "GET", EVENTS_PATH, headers=headers)).status == 401
        async with watching(server, {"authorization": f"Bearer {KEY}"}) as connection:
            assert (await next_document(connection))["nodes"] == []


async def test_a_watcher_sees_the_nodes_and_a_request_on_its_legs(server: Server, prompts: PromptMaker) -> None:
    legs: list[tuple[FakeNode, LegMessage]] = []
    prefill, decode = await server.rig.pair(lambda node, leg: legs.append((node, leg)))
    token = prompts.tokenizer.encode("Yes")[:1]
    async with watching(server) as watcher, connected(server) as client:
        first = await next_document(watcher)
        assert [node["role"] for node in first["nodes"]] == ["prefill", "decode"]
        blocks = {kind: first["nodes"][0][f"num_{kind}_blocks"] for kind in ("free", "cached", "held", "leased")}
        assert blocks == {"free": 64, "cached": 0, "held": 0, "leased": 0}
        body = json.dumps(chat_body(stream=True, messages=[{"role": "user", "content": SECRET}])).encode()
        await client.send(request_bytes("POST", "/v1/chat/completions", body, {"x-request-id": SECRET}))
        row = (await document_with(watcher, "requests"))["requests"][0]
        assert (row["leg"], row["ttft_s"], row["tpot_s"]) == ("prefill", None, None)
        assert (row["prefill_node"], row["decode_node"]) == (prefill.hello.node_id, decode.hello.node_id)
        by_kind = {type(leg): (node, leg) for node, leg in legs}
        by_kind[Prefill][0].emit(by_kind[Prefill][1], token, 0)
        while (document := await next_document(watcher))["requests"][0]["leg"] != "transfer":
            pass
        assert document["requests"][0]["ttft_s"] >= 0
        assert document["legs"] == {"queued": 0, "prefill": 0, "transfer": 1, "decode": 0}
        assert document["edges"] == [["transfer", prefill.hello.node_id, decode.hello.node_id, 1]]
        for index in (0, 1):
            by_kind[Decode][0].emit(by_kind[Decode][1], token, index)
        while (document := await next_document(watcher))["requests"][0]["leg"] != "decode":
            pass
        assert document["requests"][0]["tpot_s"] >= 0
        by_kind[Decode][0].emit(by_kind[Decode][1], token, 2, "length")
        ended = (await document_with(watcher, "ended"))["ended"][0]
        assert (ended["end"], ended["num_output_tokens"], ended["leg"]) == ("finished", 3, "")
        assert SECRET not in json.dumps([row, document, ended])


async def test_a_failed_request_is_shown_with_its_reason(server: Server) -> None:
    await server.rig.pair(lambda node, leg: node.fail(leg, "transfer_failed"))
    async with watching(server) as watcher:
        assert (await post_completion(server)).status == 502
        failure = (await document_with(watcher, "failures"))["failures"][0]
    assert (failure["status"], failure["end"]) == (502, "request_failed")
    assert failure["reason"] == "a node was lost, or reported an error"
    assert failure["attempts"]


class _Written(list[tuple[float, bytes]]):
    """Stands for the writer of a stream: notes when what was written, and leaves after the second piece."""

    async def write(self, piece: bytes) -> None:
        self.append((asyncio.get_running_loop().time(), piece))
        if len(self) == 2:
            raise ConnectionError("the watcher leaves")


async def test_what_has_not_changed_is_sent_again_only_after_a_while(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.router.http.page.serving.REPEAT_S", 0.6)
    page, written = _page_of(server), _Written()
    with pytest.raises(ConnectionError):
        await page._write(written)
    (first_s, first), (second_s, second) = written
    assert first == second
    assert second_s - first_s >= 0.6


async def test_more_watchers_than_the_bound_are_refused(server: Server) -> None:
    page = _page_of(server)
    page.num_watchers = MAX_WATCHERS
    reply = await fetch(server, "GET", EVENTS_PATH)
    assert (reply.status, reply.error["code"]) == (503, "overloaded")
    assert int(reply.headers["retry-after"]) > 0
    page.num_watchers = 0


async def test_without_a_watcher_nothing_is_made(server: Server, prompts: PromptMaker) -> None:
    page = _page_of(server)
    await server.rig.pair(answering(prompts.tokenizer.encode("Yes."), "length"))
    num_tasks = len(asyncio.all_tasks())
    await post_completion(server)
    assert page._view.num_made == 0
    async with watching(server) as watcher:
        await next_document(watcher)
        assert page.num_watchers == 1
    async with asyncio.timeout(30):
        while page.num_watchers or len(asyncio.all_tasks()) > num_tasks:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    made = page._view.num_made
    await post_completion(server)
    assert page._view.num_made == made


async def test_many_watchers_share_each_document(server: Server) -> None:
    view = _page_of(server)._view
    now_s = 0.0
    view.clock = lambda: now_s
    documents = {id(view.read()) for _ in range(50)}
    now_s = 0.2
    documents.add(id(view.read()))
    assert (len(documents), view.num_made) == (1, 1)
    now_s = 0.25
    view.read()
    assert view.num_made == 2


async def test_the_stream_ends_when_the_router_has_drained(server: Server) -> None:
    async with watching(server) as watcher:
        await next_document(watcher)
        server.endpoints.is_draining = True
        assert b'"is_draining":true' in await watcher.to_end()


async def test_a_document_is_bounded_whatever_is_in_flight(server: Server) -> None:
    view: RelayView = _page_of(server)._view
    for _ in range(MAX_COUNTED + 50):
        view.requests.begin(RequestTrace("an-id", "/v1/completions"))
    for _ in range(2 * NUM_ENDED):
        view.ends.note(RequestTrace("an-id", "/v1/completions", status=503, ended_us=now_us()))
    document = json.loads(view.read())
    assert (len(document["requests"]), document["num_counted"]) == (MAX_ROWS, MAX_COUNTED)
    assert (len(document["ended"]), len(document["failures"])) == (NUM_ENDED, NUM_FAILURES)
    assert document["legs"]["queued"] == MAX_COUNTED
    assert "an-id" not in view.read().decode()


def _ended(status: int | None, *flights: FlightTrace) -> RequestTrace:
    trace = RequestTrace("an-id", "/v1/completions", status=status, flights=list(flights))
    trace.ended_us = now_us()
    return trace


def _flight(*ends: str, end: str = "") -> FlightTrace:
    flight = FlightTrace("an-id", "f" * 32, 0, 5, RelayTimes(), end=end)
    for attempt_end in ends:
        flight.attempt_sent(now_us(), "p", "d")
        flight.attempt_ended(attempt_end)
    return flight


def test_failures_are_what_failed_or_needed_another_attempt() -> None:
    ends = LastEnds()
    for trace in (_ended(200, _flight("finished", end="finished")), _ended(None, _flight(CANCELLED, end=CANCELLED))):
        ends.note(trace)
    assert not ends.failures
    ends.note(_ended(401))
    assert len(ends.ended) == 2
    ends.note(_ended(200, _flight("transfer_failed", "finished", end="finished")))
    ends.note(_ended(503))
    shown = [failure_row(trace) for trace in ends.failures]
    assert [row["reason"] for row in shown] == ["an attempt failed, attempt 2 finished it", "service unavailable"]
    assert shown[0]["attempts"] == [{"prefill_node": "p", "decode_node": "d", "reason": "the KV did not arrive whole"}]


def test_a_clients_mistake_is_no_failure_of_the_relay() -> None:
    ends = LastEnds()
    for status in (400, 404, 413, 429, 401):
        ends.note(_ended(status))
    ends.note(_ended(200, _flight("finished", end="finished")))
    assert (ends.num_refused, ends.num_failed, list(ends.failures)) == (4, 0, [])
    assert [request_row(trace, now_us())["is_refused"] for trace in ends.ended] == [True] * 4 + [False]
    ends.note(_ended(502, _flight("request_failed", end="request_failed")))
    ends.note(_ended(200, _flight("request_failed", end="request_failed")))  # its stream had begun
    ends.note(_ended(200, _flight("transfer_failed", "finished", end="finished")))
    assert (ends.num_refused, ends.num_failed, len(ends.failures)) == (4, 2, 3)


@pytest.mark.parametrize(("body", "status"), [({"model": "org/nothing"}, 404), ({"temperature": 9.0}, 400)])
async def test_what_is_refused_is_told_as_refused(server: Server, body: dict[str, object], status: int) -> None:
    await server.rig.pair()
    async with watching(server) as watcher:
        reply = await fetch(server, "POST", "/v1/chat/completions", json.dumps(chat_body(**body)).encode())
        assert reply.status == status
        document = await document_with(watcher, "ended")
    assert (document["router"]["num_refused"], document["router"]["num_failed"]) == (1, 0)
    assert document["failures"] == []
    assert document["ended"][0]["is_refused"]


def test_times_on_legs_add_up_to_the_time_so_far() -> None:
    flight = _flight("")
    flight.times.clock = "a-clock"
    trace = RequestTrace("an-id", "/v1/completions", received_us=1_000_000, flights=[flight])
    flight.times.sent_us = 1_100_000
    assert request_row(trace, 1_500_000)["spans_s"] == [0.1, 0.4, 0.0, 0.0]
    flight.times.first = StepTimes(None, 1_200_000, 1_300_000)
    assert request_row(trace, 1_500_000)["spans_s"] == [0.1, 0.2, 0.2, 0.0]
    flight.times.second = StepTimes(1_350_000, 1_360_000, 1_400_000)
    assert request_row(trace, 1_500_000)["spans_s"] == [0.1, 0.2, 0.05, 0.15]
    flight.times.clock = ""  # nodes of other machines: their stamps cannot be compared
    trace.first_token_us = 1_310_000
    assert request_row(trace, 1_500_000)["spans_s"] == [0.1, 0.21, 0.0, 0.19]


def test_a_request_without_legs_is_queued_and_one_that_ended_is_on_none() -> None:
    trace = RequestTrace("an-id", "/v1/chat/completions")
    assert leg_of(trace) == "queued"
    trace.flights = [_flight("")]
    assert leg_of(trace) == "prefill"
    trace.flights = [_flight("request_failed")]  # the next attempt has not begun
    assert leg_of(trace) == "queued"
    log = RequestLog()
    log.begin(trace)
    log.end(trace)
    assert leg_of(trace) == ""
    assert request_row(trace, now_us())["model"] in ("", MODEL)
