"""The timings of a request for a client that asks for them, and the cases in which there are none."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.router.http.openai.prompts import PromptMaker
from baton.router.nodes.control import ControlLink
from baton.router.requests.attempt import RelayRequest
from baton.router.requests.inbox import Inbox
from baton.router.requests.timings import ClientTimes, RelayTimes, timings_of
from baton.runtime.clock import host_clock, now_us
from baton.wire.errors import RequestFailed
from baton.wire.messages.legs import Decode, Prefill
from baton.wire.messages.membership import DECODE, PREFILL
from baton.wire.messages.output import StepTimes, TokenEvent, Tokens
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.router.fake_node import FakeNode, LegMessage, Script, answering, first_index
from tests.router.http_client import (
    chat_body,
    completion_body,
    connected,
    fetch,
    parse_reply,
    post_completion,
    request_bytes,
)
from tests.router.rig import MODEL, PROMPT, Server, relaying, serving

FIRST, SECOND = StepTimes(None, 20, 30), StepTimes(40, 50, 60)
OTHER_CLOCK = "ffffffff"
WITH_USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
STATIONS = (
    "received_us",
    "sent_us",
    "prefill_begun_us",
    "first_sampled_us",
    "first_written_us",
    "kv_ready_us",
    "decode_begun_us",
    "second_sampled_us",
    "second_written_us",
)


@pytest.fixture
async def server(prompts: PromptMaker) -> AsyncIterator[Server]:
    async with serving(prompts) as running:
        yield running


def _timed(token_ids: list[int]) -> Script:
    """As `answering`, with true times of the first two tokens: token 2 is sampled after a handoff."""

    def script(node: FakeNode, leg: LegMessage) -> None:
        is_prefill_leg = isinstance(leg, Prefill)
        for index in range(first_index(leg), 1 if is_prefill_leg else len(token_ids)):
            times = StepTimes(None if index == 0 else now_us(), now_us(), now_us()) if index < 2 else None
            finish = "length" if index == len(token_ids) - 1 else ""
            event = TokenEvent(leg.handoff_id, leg.attempt, index, (token_ids[index],), (), finish, 0, times=times)
            node.send(Tokens(node.hello.epoch, (event,)))

    return script


def _timings(reply: Any, *, stream: bool) -> dict[str, Any] | None:
    found: dict[str, Any] | None = (reply.chunks[-1] if stream else reply.json())["usage"].get("timings")
    return found


@pytest.mark.parametrize(
    ("path", "make_body"), [("/v1/chat/completions", chat_body), ("/v1/completions", completion_body)]
)
async def test_the_stamps_of_a_stream_are_in_order(
    server: Server, prompts: PromptMaker, path: str, make_body: Callable[..., dict[str, Any]]
) -> None:
    prefill, decode = await server.rig.pair()
    script = _timed(prompts.tokenizer.encode("abc"))
    before_us = now_us()
    async with connected(server) as connection:
        body = json.dumps(make_body(return_timings=True, **WITH_USAGE)).encode()
        await connection.send(request_bytes("POST", path, body))
        script(prefill, await prefill.expect(Prefill))
        await connection.until(b':"a"')
        script(decode, await decode.expect(Decode))
        timings = parse_reply(await connection.to_end()).chunks[-1]["usage"]["timings"]
    assert (timings.pop("clock"), timings.pop("attempts")) == (host_clock(), 1)
    stamps = [before_us, *(timings.pop(name) for name in STATIONS), now_us()]
    assert stamps == sorted(stamps)
    assert timings == {}


async def test_an_answer_that_is_not_streamed_has_no_times_of_writing(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(_timed(prompts.tokenizer.encode("abc")))
    timings = _timings(await post_completion(server, return_timings=True), stream=False)
    assert timings is not None
    assert timings["first_written_us"] is timings["second_written_us"] is None
    assert timings["received_us"] <= timings["sent_us"] <= timings["first_sampled_us"]


@pytest.mark.parametrize("stream", [False, True])
async def test_who_does_not_ask_is_told_nothing(server: Server, prompts: PromptMaker, stream: bool) -> None:
    await server.rig.pair(_timed(prompts.tokenizer.encode("abc")))
    options = WITH_USAGE if stream else {}
    for asked in ({}, {"return_timings": False}):
        assert _timings(await post_completion(server, **asked, **options), stream=stream) is None


async def test_several_choices_have_no_times(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(_timed(prompts.tokenizer.encode("abc")))
    assert _timings(await post_completion(server, return_timings=True, n=2), stream=False) is None


@pytest.mark.parametrize(("of_prefill", "of_decode"), [(OTHER_CLOCK, host_clock()), (host_clock(), OTHER_CLOCK)])
async def test_a_node_with_another_clock_leaves_the_times_out(
    server: Server, prompts: PromptMaker, of_prefill: str, of_decode: str
) -> None:
    script = _timed(prompts.tokenizer.encode("abc"))
    await server.rig.join(PREFILL, script, clock=of_prefill)
    await server.rig.join(DECODE, script, clock=of_decode)
    assert _timings(await post_completion(server, return_timings=True), stream=False) is None


async def test_another_attempt_is_counted(server: Server, prompts: PromptMaker) -> None:
    token_ids = prompts.tokenizer.encode("abc")

    def script(node: FakeNode, leg: LegMessage) -> None:
        if leg.attempt == 1:
            node.fail(leg, RequestFailed.code)
        else:
            _timed(token_ids)(node, leg)

    await server.rig.join(DECODE, script)
    timings = _timings(await post_completion(server, return_timings=True), stream=False)
    assert timings is not None
    assert timings["attempts"] == 2


async def test_nodes_that_give_no_times_leave_them_open(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(answering(prompts.tokenizer.encode("abc"), "length"))
    timings = _timings(await post_completion(server, return_timings=True, **WITH_USAGE), stream=True)
    assert timings is not None
    assert timings["prefill_begun_us"] is timings["first_sampled_us"] is timings["second_sampled_us"] is None
    assert timings["sent_us"] is not None


async def test_two_tokens_in_one_event_have_no_time_of_writing(server: Server, prompts: PromptMaker) -> None:
    decode = await server.rig.join(DECODE)
    async with connected(server) as connection:
        body = json.dumps(completion_body(return_timings=True, **WITH_USAGE)).encode()
        await connection.send(request_bytes("POST", "/v1/completions", body))
        decode.emit(await decode.expect(Decode), prompts.tokenizer.encode("ab"), finish="length")
        timings = parse_reply(await connection.to_end()).chunks[-1]["usage"]["timings"]
    assert timings["first_written_us"] is timings["second_written_us"] is None


async def test_times_of_the_nodes_are_in_the_metrics(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(_timed(prompts.tokenizer.encode("abc")))
    await post_completion(server)
    await post_completion(server, stream=True)
    text = (await fetch(server, "GET", "/metrics")).body.decode()
    samples = {
        sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples
    }
    assert samples["baton:request_queue_time_seconds_count"] == 2
    assert samples["baton:request_prefill_time_seconds_count"] == 2
    assert samples["baton:handover_seconds_count"] == 1
    assert 0 < samples["baton:handover_seconds_sum"] < 10


async def test_legs_are_stamped_before_the_first_of_them_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    sending_us: list[int] = []
    send = ControlLink.send

    def send_slowly(link: ControlLink, epoch: int, message: object) -> bool:
        sending_us.append(now_us())
        while now_us() == sending_us[-1]:
            pass
        return send(link, epoch, message)

    async with relaying() as rig:
        await rig.pair()
        monkeypatch.setattr(ControlLink, "send", send_slowly)
        requests = [RelayRequest(MODEL, Prompt(PROMPT), DecodingParams(seed=1, choice=number)) for number in range(2)]
        flights = rig.relay.start_choices(requests, Inbox(), 0)
        assert len(sending_us) == 2
        for flight in flights:
            sent_us = flight.figures.times.sent_us
            assert sent_us is not None
            assert max(sent_us, flight.trace.attempts[0].sent_us) <= sending_us[0]
            rig.relay.close(flight)


def test_the_first_attempt_says_when_the_legs_went_out() -> None:
    times = RelayTimes("here")
    times.legs_sent(10, "here")
    times.legs_sent(99, "here", "here")
    assert (times.sent_us, times.clock) == (10, "here")


def test_the_first_report_about_a_token_counts() -> None:
    times = RelayTimes("here")
    for first, second in ((FIRST, SECOND), (StepTimes(None, 1, 1), StepTimes(None, 2, 2))):
        times.sampled(0, first)
        times.sampled(1, second)
        times.sampled(2, first)
    assert (times.first, times.second) == (FIRST, SECOND)


@pytest.mark.parametrize("num_tokens", [(2, 3), (2,), (3, 4)])
def test_a_first_event_that_is_not_token_1_alone_stamps_nothing(num_tokens: tuple[int, ...]) -> None:
    times = ClientTimes(5)
    for count in num_tokens:
        times.written(count, 70)
    assert (times.first_written_us, times.second_written_us) == (None, None)


def test_every_stamp_has_its_name() -> None:
    relay = RelayTimes("here")
    relay.legs_sent(10, "here")
    relay.sampled(0, FIRST)
    relay.sampled(1, SECOND)
    client = ClientTimes(5)
    client.written(1, 35)
    client.written(2, 65)
    assert timings_of(client, relay, 1) == {
        "clock": "here", "received_us": 5, "sent_us": 10, "prefill_begun_us": 20, "first_sampled_us": 30,
        "kv_ready_us": 40, "decode_begun_us": 50, "second_sampled_us": 60, "first_written_us": 35,
        "second_written_us": 65, "attempts": 1,
    }  # fmt: skip


def test_clocks_without_a_name_are_never_the_same() -> None:
    times = RelayTimes("")
    times.legs_sent(10, "")
    assert timings_of(ClientTimes(5), times, 1) is None
