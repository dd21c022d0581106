"""What can be seen of single requests: their timeline on /debug/requests, and their line in the log."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.request_log import RequestLog
from baton.router.requests.timings import RelayTimes
from baton.router.requests.trace import FlightTrace, RequestTrace
from baton.router.settings import RouterSettings
from baton.runtime.clock import now_us
from baton.runtime.process import FIELDS
from baton.wire.errors import RequestFailed
from baton.wire.messages.legs import Decode, Prefill
from baton.wire.messages.membership import DECODE
from baton.wire.messages.output import StepTimes, TokenEvent, Tokens
from tests.router.fake_node import FakeNode, LegMessage, Script, answering, first_index
from tests.router.http_client import chat_body, completion_body, connected, fetch, post_completion, request_bytes
from tests.router.rig import MODEL, Server, serving

DEBUG = RouterSettings(enable_debug_endpoints=True, enable_log_requests=True)
SECRET = "canary-of-the-prompt"


@pytest.fixture
async def server(prompts: PromptMaker) -> AsyncIterator[Server]:
    async with serving(prompts, router_settings=DEBUG) as running:
        yield running


def _timed(token_ids: list[int]) -> Script:
    """As `answering`, with true times of the first two tokens: token 2 is sampled after a handoff."""

    def script(node: FakeNode, leg: LegMessage) -> None:
        for index in range(first_index(leg), 1 if isinstance(leg, Prefill) else len(token_ids)):
            times = StepTimes(None if index == 0 else now_us(), now_us(), now_us()) if index < 2 else None
            finish = "length" if index == len(token_ids) - 1 else ""
            event = TokenEvent(leg.handoff_id, leg.attempt, index, (token_ids[index],), (), finish, 3, times=times)
            node.send(Tokens(node.hello.epoch, (event,)))

    return script


async def _post(server: Server, request_id: str, **members: Any) -> int:
    body = json.dumps(completion_body(prompt=SECRET, **members)).encode()
    return (await fetch(server, "POST", "/v1/completions", body, {"X-Request-Id": request_id})).status


async def _shown(server: Server, name: str) -> list[dict[str, Any]]:
    reply = await fetch(server, "GET", f"/debug/requests/{name}")
    found: list[dict[str, Any]] = reply.json()["data"]
    return found


async def test_a_timeline_goes_over_router_and_nodes(server: Server, prompts: PromptMaker) -> None:
    prefill, decode = await server.rig.pair()
    prefill.script = decode.script = _timed(prompts.tokenizer.encode("abc"))
    assert await _post(server, "job-7", max_tokens=9) == 200
    (shown,) = await _shown(server, "job-7")
    assert (shown["model"], shown["status"], shown["end"], shown["num_attempts"]) == (MODEL, 200, "finished", 1)
    assert 0 <= shown["ttft_s"] <= shown["duration_s"]
    (choice,) = shown["choices"]
    assert (choice["finish_reason"], choice["num_output_tokens"], choice["num_cached_tokens"]) == ("length", 3, 3)
    (attempt,) = choice["attempts"]
    assert (attempt["prefill_node"], attempt["decode_node"]) == (prefill.hello.node_id, decode.hello.node_id)
    assert attempt["end"] == "finished"
    events = [moment["event"] for moment in choice["timeline"]]
    assert (events[0], events[1], events[-1]) == ("received", "legs_sent", "ended")
    order = ("prefill_begun", "token_1_sampled", "kv_ready", "decode_begun", "token_2_sampled")
    assert [event for event in events if event in order] == list(order)


async def test_nothing_shown_or_logged_holds_text(
    server: Server, prompts: PromptMaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await server.rig.pair(_timed(prompts.tokenizer.encode("abc")))
    await _post(server, "job-7", user=SECRET)
    for path in ("/debug/requests", "/debug/requests/job-7"):
        reply = await fetch(server, "GET", path)
        assert b"job-7" in reply.body
        assert SECRET.encode() not in reply.body
    assert SECRET not in caplog.text
    assert SECRET not in repr([vars(record) for record in caplog.records])


async def test_an_attempt_that_failed_is_shown_with_its_end(server: Server, prompts: PromptMaker) -> None:
    _, decode = await server.rig.pair()
    asking = asyncio.create_task(_post(server, "job-7"))
    leg = await decode.expect(Decode)
    server.rig.nodes[0].script = decode.script = answering(prompts.tokenizer.encode("abc"), "length")
    decode.fail(leg, RequestFailed.code)
    assert await asking == 200
    (shown,) = await _shown(server, "job-7")
    assert shown["num_attempts"] == 2
    assert [attempt["end"] for attempt in shown["choices"][0]["attempts"]] == [RequestFailed.code, "finished"]


async def test_a_request_in_flight_is_shown_as_it_stands(server: Server) -> None:
    decode = await server.rig.join(DECODE)
    asking = asyncio.create_task(_post(server, "job-7"))
    leg = await decode.expect(Decode)
    for num_tokens in (1, 2):
        decode.emit(leg, [5], num_tokens - 1)
        await server.rig.has_heard(decode)
        (shown,) = await _shown(server, "job-7")
        assert (shown["status"], shown["end"], shown["num_output_tokens"]) == (None, "", num_tokens)
    decode.emit(leg, [5], 2, finish="length")
    assert await asking == 200
    assert (await _shown(server, "job-7"))[0]["end"] == "finished"


async def test_failures_refusals_and_clients_that_leave_have_their_ends(server: Server) -> None:
    await _post(server, "early")
    decode = await server.rig.join(DECODE)
    await _post(server, "refused", temperature=9)
    async with connected(server) as connection:
        body = json.dumps(chat_body(stream=True)).encode()
        await connection.send(request_bytes("POST", "/v1/chat/completions", body, {"X-Request-Id": "left"}))
        await decode.expect(Decode)
        connection.break_off()
    await server.rig.settle()
    listed = (await fetch(server, "GET", "/debug/requests")).json()["data"]
    ends = {shown["request_id"]: (shown["status"], shown["end"]) for shown in listed}
    assert ends == {"early": (503, "refused"), "refused": (400, "refused"), "left": (None, "cancelled")}


async def test_an_id_that_was_used_twice_shows_both_requests(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(answering(prompts.tokenizer.encode("abc"), "length"))
    await _post(server, "job-7")
    await _post(server, "job-7", n=2)
    newest, oldest = await _shown(server, "job-7")
    assert (len(newest["choices"]), len(oldest["choices"])) == (2, 1)
    handoff_id = oldest["choices"][0]["handoff_id"]
    assert await _shown(server, handoff_id) == [oldest]


async def test_an_unknown_id_is_not_found(server: Server) -> None:
    reply = await fetch(server, "GET", "/debug/requests/never")
    assert (reply.status, reply.error["code"]) == (404, "not_found")


async def test_nothing_is_served_or_logged_by_default(prompts: PromptMaker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(prompts) as server:
        await server.rig.pair(answering(prompts.tokenizer.encode("abc"), "length"))
        assert (await post_completion(server)).status == 200
        assert (await fetch(server, "GET", "/debug/requests")).status == 404
    assert not [record for record in caplog.records if record.name == "baton.router.http.request_log"]


async def test_one_line_per_request_says_how_it_went(
    server: Server, prompts: PromptMaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await server.rig.pair(answering(prompts.tokenizer.encode("abc"), "length"))
    body = json.dumps(completion_body(prompt=[SECRET, SECRET * 2], n=2)).encode()
    await fetch(server, "POST", "/v1/completions", body, {"X-Request-Id": "job-7"})
    await fetch(server, "GET", "/v1/models")
    (record,) = [record for record in caplog.records if record.name == "baton.router.http.request_log"]
    fields = vars(record)[FIELDS]
    assert (fields["request_id"], fields["model"], fields["status"]) == ("job-7", MODEL, 200)
    assert (fields["num_choices"], fields["num_output_tokens"], fields["finish_reasons"]) == (4, 12, "length")
    assert fields["num_prompt_tokens"] == sum(len(prompts.tokenizer.encode(SECRET * times)) for times in (1, 2))


def test_what_is_kept_is_bounded_in_requests_and_in_choices() -> None:
    ended: list[RequestTrace] = []
    log = RequestLog(num_kept=5, observers=[ended.append])
    flight = FlightTrace("", "", 0, 1, RelayTimes())
    for number in range(9):
        _record(log, RequestTrace(str(number), "/v1/completions"))
    assert [trace.request_id for trace in log.recent()] == ["8", "7", "6", "5", "4"]
    _record(log, RequestTrace("wide", "/v1/completions", flights=[flight] * 20))
    _record(log, RequestTrace("wider", "/v1/completions", flights=[flight] * 100))
    assert [trace.request_id for trace in log.recent()] == ["wider"]
    assert len(ended) == 11


def _record(log: RequestLog, trace: RequestTrace) -> None:
    log.begin(trace)
    log.end(trace)
