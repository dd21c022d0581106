"""The HTTP endpoint on a real port, with nodes that answer as the test says: shapes of answers, ends of streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.openai.replies import CompletionStream
from baton.router.http.serving.limits import HttpLimits
from baton.wire.errors import RequestFailed
from baton.wire.messages.legs import Cancel, Decode, Prefill
from baton.wire.messages.membership import DECODE
from baton.wire.messages.output import TokenEvent, Tokens
from baton.wire.tiers import TierTokens
from tests.router.fake_node import FakeNode, LegMessage, Script, answering, choice_legs
from tests.router.http_client import (
    chat_body,
    completion_body,
    connected,
    fetch,
    parse_reply,
    post_chat,
    post_completion,
    request_bytes,
)
from tests.router.rig import DEFAULTS, MODEL, Server, serving

TEXT = "The river goes to the sea."


@pytest.fixture
async def server(prompts: PromptMaker) -> AsyncIterator[Server]:
    async with serving(prompts) as running:
        yield running


def _saying(prompts: PromptMaker, text: str = TEXT, finish: str = "stop") -> Script:
    """Nodes that answer `text`; with "stop" the last token is the one that ends an answer."""
    end = [max(prompts.tokenizer.eos_token_ids)] if finish == "stop" else []
    return answering([*prompts.tokenizer.encode(text), *end], finish)


def _content(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def _finish_reasons(chunks: list[dict[str, Any]], index: int = 0) -> list[str]:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]


async def test_a_chat_completion(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(_saying(prompts))
    reply = await post_chat(server, max_tokens=60)
    answer = reply.json()
    num_tokens = len(prompts.tokenizer.encode(TEXT)) + 1
    assert reply.status == 200
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert answer["choices"][0]["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["completion_tokens"] == num_tokens
    assert usage["total_tokens"] == usage["prompt_tokens"] + num_tokens
    assert len(reply.headers["x-request-id"]) == 32
    await server.rig.settle()


async def test_a_chat_prompt_goes_through_the_template(server: Server, prompts: PromptMaker) -> None:
    _, decode = await server.rig.pair(_saying(prompts))
    await post_chat(server, messages=[{"role": "user", "content": "Hi"}])
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    prompt = (await decode.expect(Decode)).prompt
    assert prompts.tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == expected


async def test_a_chat_stream(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(_saying(prompts))
    reply = await post_chat(server, stream=True, stream_options={"include_usage": True})
    *chunks, usage = reply.chunks
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert len(reply.headers["x-request-id"]) == 32
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert _content(chunks) == TEXT
    assert _finish_reasons(chunks) == ["stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(prompts.tokenizer.encode(TEXT)) + 1
    await server.rig.settle()


@pytest.mark.parametrize("post", [post_chat, post_completion])
async def test_every_chunk_says_how_many_tokens_its_choice_has_so_far(
    server: Server, prompts: PromptMaker, post: Callable[..., Any]
) -> None:
    await server.rig.pair(_saying(prompts, "abc", finish="length"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = (await post(server, stream=True, stream_options=options, n=2, return_token_ids=True)).chunks
    for index in (0, 1):
        usages = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [usage["completion_tokens"] for usage in usages] == [0, 1, 2, 3]
        assert {usage["prompt_tokens"] for usage in usages} == {last["usage"]["prompt_tokens"]}
        assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)


@pytest.mark.parametrize("post", [post_chat, post_completion])
async def test_an_ignored_field_is_named_once_in_the_answer_and_counted(
    server: Server, prompts: PromptMaker, post: Callable[..., Any]
) -> None:
    await server.rig.pair(_saying(prompts, "abc", finish="length"))
    warnings = [
        "store is ignored: answers of this endpoint are not stored",
        "colour is ignored: this endpoint knows no such field",
    ]
    members = {"store": True, "colour": "\u2028"}
    assert (await post(server, **members)).json()["warnings"] == warnings
    first, *others = (await post(server, **members, stream=True, n=2)).chunks
    assert first["warnings"] == warnings
    assert _content([first, *others]) == "abc"
    assert not any("warnings" in chunk for chunk in others)
    assert "warnings" not in (await post(server)).json()
    counts = (await fetch(server, "GET", "/metrics")).body.decode()
    assert 'baton:ignored_fields_total{field="store"} 2.0' in counts
    assert 'baton:ignored_fields_total{field="other"} 2.0' in counts
    server.endpoints.is_strict = True
    reply = await post(server, store=True)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "unsupported_parameter", "store")


async def test_what_does_not_fit_behind_each_prompt_is_not_asked_for(server: Server) -> None:
    asked: list[tuple[int, int | None]] = []

    def script(node: FakeNode, leg: LegMessage) -> None:
        asked.append((leg.prompt.num_tokens, leg.params.max_tokens))
        node.emit(leg, [5], finish="length")

    await server.rig.join(DECODE, script)
    assert (await post_completion(server, prompt=[[5] * 255, [5] * 250, [5]])).status == 200
    assert sorted(asked) == [(1, 16), (250, 6), (255, 1)]


@pytest.mark.parametrize(
    ("members", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, [7, 8, 9]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [0, 1, 2]),
        ({"truncate_prompt_tokens": 50}, [*range(10)]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 250}, [4, 5, 6, 7, 8, 9]),
    ],
)
async def test_a_prompt_is_cut_as_asked(server: Server, members: dict[str, Any], kept: list[int]) -> None:
    decode = await server.rig.join(DECODE, lambda node, leg: node.emit(leg, [5], finish="length"))
    assert (await post_completion(server, prompt=[*range(10)], **members)).json()["usage"]["prompt_tokens"] == len(kept)
    assert list((await decode.expect(Decode)).prompt.token_ids) == kept


async def test_equal_salts_are_equal_for_the_nodes_and_others_are_not(server: Server) -> None:
    decode = await server.rig.join(DECODE, lambda node, leg: node.emit(leg, [5], finish="length"))
    salts = []
    for members in ({}, {"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}):
        await post_completion(server, **members)
        salts.append((await decode.expect(Decode)).prompt.cache_salt)
    assert [len(salt) for salt in salts] == [0, 32, 32, 32]
    assert (salts[1] == salts[2], len(set(salts))) == (True, 3)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_without_text_has_token_ids(server: Server, prompts: PromptMaker, stream: bool) -> None:
    await server.rig.pair(_saying(prompts, "abc", finish="length"))
    reply = await post_completion(server, stream=stream, detokenize=False)
    choices = [chunk["choices"][0] for chunk in reply.chunks] if stream else reply.json()["choices"]
    assert {choice["text"] for choice in choices} == {""}
    token_ids = [token_id for choice in choices for token_id in choice.get("token_ids", [])]
    assert token_ids == prompts.tokenizer.encode("abc")


async def test_a_final_message_is_continued(server: Server, prompts: PromptMaker) -> None:
    _, decode = await server.rig.pair(_saying(prompts))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    await post_chat(server, messages=messages, continue_final_message=True)
    prompt = prompts.tokenizer.decode((await decode.expect(Decode)).prompt.token_ids, skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nWell, "


async def test_a_completion_and_its_stream_say_the_same(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(_saying(prompts, finish="length"))
    answer = (await post_completion(server)).json()
    chunks = (await post_completion(server, stream=True)).chunks
    assert answer["object"] == chunks[0]["object"] == "text_completion"
    assert answer["choices"][0]["text"] == _content(chunks) == TEXT
    assert [answer["choices"][0]["finish_reason"]] == _finish_reasons(chunks) == ["length"]
    assert "usage" not in chunks[0]


async def test_a_short_prompt_is_told_how_much_was_cached(server: Server, prompts: PromptMaker) -> None:
    await server.rig.join(DECODE, lambda node, leg: node.emit(leg, [5], finish="stop", cached=7))
    assert (await post_completion(server)).json()["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 7,
        "cached_tokens_by_node": {"decode": 7},
        "cached_tokens_by_place": {"decode": 7},
    }


async def test_nothing_cached_has_no_place(server: Server) -> None:
    await server.rig.join(DECODE, lambda node, leg: node.emit(leg, [5], finish="stop"))
    details = (await post_completion(server)).json()["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 0, "cached_tokens_by_node": {"decode": 0}}


@pytest.mark.parametrize("num_tokens", [1, 3])
async def test_each_node_says_how_much_of_the_prompt_it_had(server: Server, num_tokens: int) -> None:
    def script(node: FakeNode, leg: LegMessage) -> None:
        for index in range(1 if isinstance(leg, Prefill) else num_tokens):
            # a decode node repeats the prefill node's first token with all that belongs to it
            finish = "length" if index == num_tokens - 1 else ""
            tiers = (TierTokens("host", 3),) if index == 0 else ()
            node.emit(leg, [5], index, finish, cached=4 if index == 0 else 16, tiers=tiers)

    await server.rig.pair(script)
    details = (await post_completion(server, prompt=[[5] * 40, [6] * 40])).json()["usage"]["prompt_tokens_details"]
    by_node = {"prefill": 8} if num_tokens == 1 else {"prefill": 8, "decode": 32}
    by_place = {"prefill": 2, "host": 6}
    assert details == {"cached_tokens": 8, "cached_tokens_by_node": by_node, "cached_tokens_by_place": by_place}


async def test_the_first_token_is_streamed_before_the_decode_node_has_said_anything(
    server: Server, prompts: PromptMaker
) -> None:
    prefill, decode = await server.rig.pair()
    first, second = prompts.tokenizer.encode("ab")
    async with connected(server) as connection:
        body = json.dumps(completion_body(stream=True)).encode()
        await connection.send(request_bytes("POST", "/v1/completions", body))
        prefill.emit(await prefill.expect(Prefill), [first])
        await connection.until(b'"text":"a"')
        leg = await decode.expect(Decode)
        decode.emit(leg, [first, second], 0, finish="length")
        assert _content(parse_reply(await connection.to_end()).chunks) == "ab"
    await server.rig.settle()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_cuts_the_text_and_cancels_the_rest(
    server: Server, prompts: PromptMaker, stream: bool
) -> None:
    ids = prompts.tokenizer.encode(TEXT)
    decode = await server.rig.join(DECODE, lambda node, leg: node.emit(leg, ids))  # it would go on for ever
    reply = await post_completion(server, stop=[" to the"], stream=stream)
    text = _content(reply.chunks) if stream else reply.json()["choices"][0]["text"]
    assert text == "The river goes"
    leg = await decode.expect(Decode)
    assert await decode.expect(Cancel) == Cancel(leg.handoff_id, 1)
    await server.rig.settle()


async def test_log_probabilities(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(_saying(prompts, "abc", finish="length"))
    chat = (await post_chat(server, logprobs=True, top_logprobs=1)).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in chat] == list("abc")
    assert {entry["logprob"] for entry in chat} == {-0.5}
    assert [entry["top_logprobs"][0]["token"] for entry in chat] == list("abc")
    text = (await post_completion(server, logprobs=1)).json()["choices"][0]["logprobs"]
    assert (text["tokens"], text["text_offset"]) == (list("abc"), [0, 1, 2])


def _naming_the_choice(prompts: PromptMaker) -> Script:
    """Each choice says its prompt's last character, its number and a dot."""

    def script(node: FakeNode, leg: LegMessage) -> None:
        prompt = prompts.tokenizer.decode(leg.prompt.token_ids)
        answering(prompts.tokenizer.encode(f"{prompt[-1]}{leg.params.choice}."), "length")(node, leg)

    return script


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_of_several_prompts_have_their_indices(
    server: Server, prompts: PromptMaker, stream: bool
) -> None:
    await server.rig.pair(_naming_the_choice(prompts))
    texts = ["A first prompt x", "A second prompt y"]
    reply = await post_completion(server, prompt=texts, n=3, stream=stream, stream_options=None)
    expected = ["x0.", "x1.", "x2.", "y0.", "y1.", "y2."]
    if stream:
        assert [_content(reply.chunks, index) for index in range(6)] == expected
        assert all(_finish_reasons(reply.chunks, index) == ["length"] for index in range(6))
    else:
        answer = reply.json()
        assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [*enumerate(expected)]
        num_prompt_tokens = sum(len(prompts.tokenizer.encode(text)) for text in texts)
        num_tokens = sum(len(prompts.tokenizer.encode(text)) for text in expected)
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (
            num_prompt_tokens, num_tokens
        )  # fmt: skip
    await server.rig.settle()


async def test_one_failed_choice_ends_the_others(server: Server) -> None:
    decode = await server.rig.join(DECODE)
    waiting = asyncio.create_task(post_completion(server, n=2))
    first, second = choice_legs(await decode.expect(Decode))
    decode.emit(first, [5])
    for attempt in range(1, DEFAULTS.max_attempts + 1):
        decode.fail(second, RequestFailed.code)
        if attempt < DEFAULTS.max_attempts:
            second = await decode.expect(Decode)
    reply = await waiting
    assert (reply.status, reply.error["code"]) == (502, "request_failed")
    await server.rig.settle()


async def test_models(server: Server) -> None:
    await server.rig.join(DECODE)
    listed = (await fetch(server, "GET", "/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == [MODEL]
    one = await fetch(server, "GET", f"/v1/models/{MODEL}")
    assert one.json() == listed["data"][0]
    assert one.json()["max_model_len"] == 256
    missing = await fetch(server, "GET", "/v1/models/other/model")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


async def test_a_model_tells_to_which_switches_of_thinking_it_listens(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "thinking")
    template = "{{ messages[0].content }}{% if not enable_thinking %}/no_think{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    prompts = PromptMaker.from_folder(folder)
    async with serving(prompts) as server:
        assert (await fetch(server, "GET", f"/v1/models/{MODEL}")).json()["thinking_switches"] == ["enable_thinking"]
    prompts.close()


async def test_health_follows_the_decode_nodes(server: Server) -> None:
    assert (await fetch(server, "GET", "/health")).status == 503
    await server.rig.pair()
    reply = await fetch(server, "GET", "/health")
    counts = {"prefill": 1, "decode": 1}
    assert (reply.status, reply.json()) == (200, {"status": "ok", "nodes": counts, "models": {MODEL: counts}})
    server.endpoints.is_draining = True
    assert (await fetch(server, "GET", "/health")).status == 503


async def test_metrics_count_what_happened(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(_saying(prompts, "abc", finish="length"))
    await post_completion(server)
    await post_chat(server, stream=True)
    reply = await fetch(server, "GET", "/metrics")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(reply.body.decode())
        for sample in family.samples
    }
    assert samples["baton:request_success_total", "length", MODEL] == 2
    assert samples["baton:generation_tokens_total", MODEL] == 6
    assert samples["baton:time_to_first_token_seconds_count", MODEL] == 2
    assert samples["baton:relay_finished_total",] == 2
    assert samples["baton:relay_cancelled_total",] == 0
    assert samples["baton:num_requests_running", MODEL] == 0
    assert samples["baton:nodes", MODEL, "decode"] == 1


async def test_without_nodes_the_answer_is_503_with_retry_after(server: Server) -> None:
    for stream in (False, True):
        reply = await post_chat(server, stream=stream)
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "no_node", "1")
    await server.rig.pair()
    server.rig.nodes[1].leave()
    await server.rig.loses(DECODE)
    assert (await post_chat(server, stream=True)).status == 503


async def test_a_draining_router_takes_nothing_new(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(_saying(prompts))
    server.endpoints.is_draining = True
    reply = await post_chat(server)
    assert (reply.status, reply.error["type"]) == (503, "service_unavailable_error")
    assert int(reply.headers["retry-after"]) >= 1


async def test_too_many_requests_are_answered_with_503(prompts: PromptMaker) -> None:
    async with serving(prompts, replace(DEFAULTS, max_concurrent_requests=1)) as server:
        decode = await server.rig.join(DECODE)
        waiting = asyncio.create_task(post_completion(server))
        leg = await decode.expect(Decode)
        reply = await post_chat(server, stream=True)
        assert (reply.status, reply.error["code"]) == (503, "overloaded")
        decode.emit(leg, [5], finish="length")
        assert (await waiting).status == 200


async def test_more_choices_than_could_ever_run_are_refused_before_the_first(
    prompts: PromptMaker,
) -> None:
    async with serving(prompts, replace(DEFAULTS, max_concurrent_requests=2)) as server:
        decode = await server.rig.join(DECODE)
        assert (await post_completion(server, n=3, stream=True)).error["param"] == "n"
        assert not decode.has(Decode)


async def test_a_deadline_is_answered_with_504(prompts: PromptMaker) -> None:
    async with serving(prompts, replace(DEFAULTS, request_timeout_s=0.1)) as server:
        await server.rig.join(DECODE)
        assert (await post_completion(server)).status == 504
        await server.rig.settle()


async def test_a_bug_is_a_500_without_details(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("secret detail")

    await server.rig.join(DECODE)
    monkeypatch.setattr(type(server.rig.relay), "check_size", fail)
    reply = await post_chat(server)
    assert (reply.status, reply.error["code"]) == (500, "internal_error")
    assert b"secret" not in reply.body


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_cancels_its_request(server: Server, stream: bool) -> None:
    prefill, decode = await server.rig.pair()
    async with connected(server) as connection:
        body = json.dumps(chat_body(stream=stream)).encode()
        await connection.send(request_bytes("POST", "/v1/chat/completions", body))
        await decode.expect(Decode)
        connection.break_off()
    await prefill.expect(Cancel)
    await decode.expect(Cancel)
    await server.rig.settle()


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_a_client_that_leaves_a_stream_cancels_its_request(server: Server, num_choices: int) -> None:
    decode = await server.rig.join(DECODE)
    async with connected(server) as connection:
        body = json.dumps(completion_body(stream=True, n=num_choices)).encode()
        await connection.send(request_bytes("POST", "/v1/completions", body))
        decode.emit(await decode.expect(Decode), [70])
        await connection.until(b"data: ")
        connection.break_off()
    for _ in range(num_choices):
        await decode.expect(Cancel)
    await server.rig.settle()


async def test_a_failure_after_the_first_token_is_an_event_and_a_connection_that_breaks_off(
    server: Server, prompts: PromptMaker, caplog: pytest.LogCaptureFixture
) -> None:
    (first,) = prompts.tokenizer.encode("a")

    def script(node: FakeNode, leg: LegMessage) -> None:
        if leg.attempt == 1:
            node.emit(leg, [first])
        node.fail(leg, RequestFailed.code, "the pool burned")

    await server.rig.join(DECODE, script)
    async with connected(server) as connection:
        body = json.dumps(completion_body(stream=True)).encode()
        await connection.send(request_bytes("POST", "/v1/completions", body, is_last=False))
        raw = await connection.to_end()
    reply = parse_reply(raw)
    assert reply.status == 200
    assert not reply.is_whole
    assert not raw.endswith(b"0\r\n\r\n")
    assert json.loads(reply.events[0])["choices"][0]["text"] == "a"
    error = json.loads(reply.events[-1])["error"]
    assert error["code"] == "request_failed"
    assert b"[DONE]" not in raw
    assert raw.count(b"HTTP/1.1") == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    await server.rig.settle()


async def test_a_bug_in_the_middle_of_a_stream_is_no_second_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise RuntimeError("secret detail")

    decode = await server.rig.join(DECODE)
    monkeypatch.setattr(CompletionStream, "usage", fail)
    body = json.dumps(completion_body(stream=True, stream_options={"include_usage": True})).encode()
    async with connected(server) as connection:
        await connection.send(request_bytes("POST", "/v1/completions", body, is_last=False))
        leg = await decode.expect(Decode)
        decode.emit(leg, [70])
        await connection.until(b"data: ")
        decode.emit(leg, [70], 1, finish="length")
        raw = await connection.to_end()
    reply = parse_reply(raw)
    assert not reply.is_whole
    assert json.loads(reply.events[-1])["error"]["code"] == "internal_error"
    assert (raw.count(b"HTTP/1.1"), raw.count(b"secret"), raw.count(b"[DONE]")) == (1, 0, 0)


async def test_a_failure_before_the_first_token_is_a_status_even_for_a_stream(server: Server) -> None:
    await server.rig.join(DECODE, lambda node, leg: node.fail(leg, RequestFailed.code))
    reply = await post_chat(server, stream=True)
    assert (reply.status, reply.error["code"]) == (502, "request_failed")


async def test_a_node_that_finds_the_request_wrong_is_a_400(server: Server) -> None:
    await server.rig.join(DECODE, lambda node, leg: node.fail(leg, "context_length_exceeded", "too long"))
    reply = await post_chat(server)
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


async def _leave_a_stream_unread(prompts: PromptMaker) -> bool:
    """Whether the router still ends the request of a client that reads nothing, and breaks its answer off."""
    async with serving(prompts, limits=HttpLimits(write_s=0.3)) as server:
        decode = await server.rig.join(DECODE)
        async with connected(server, buffer_bytes=4096) as connection:
            body = json.dumps(completion_body(stream=True)).encode()
            await connection.send(request_bytes("POST", "/v1/completions", body))
            leg = await decode.expect(Decode)
            index = 0
            async with asyncio.timeout(60.0):
                while not decode.has(Cancel):
                    decode.emit(leg, [70] * 2000, index * 2000)
                    index += 1
                    await asyncio.sleep(0.01)
            with contextlib.suppress(ConnectionError):
                await connection.to_end()
            is_broken_off = not parse_reply(bytes(connection.received)).is_whole
        await server.rig.settle()
        return is_broken_off


@pytest.mark.parametrize("loop_factory", [asyncio.SelectorEventLoop, uvloop.Loop])
def test_a_client_that_reads_nothing_is_dropped_silently(
    prompts: PromptMaker,
    caplog: pytest.LogCaptureFixture,
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert runner.run(_leave_a_stream_unread(prompts))
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_what_comes_together_leaves_in_one_write(server: Server) -> None:
    decode = await server.rig.join(DECODE)
    async with connected(server) as connection:
        body = json.dumps(completion_body(stream=True, n=2)).encode()
        await connection.send(request_bytes("POST", "/v1/completions", body))
        legs = choice_legs(await decode.expect(Decode))
        decode.emit(legs[0], [70])
        await connection.until(b'"index":0')
        decode.emit(legs[1], [70])
        await connection.until(b'"index":1')
        for index, finish in ((1, ""), (2, ""), (3, "length")):
            events = [TokenEvent(leg.handoff_id, 1, index, (71,), (), finish, 0) for leg in legs]
            decode.send(Tokens(decode.hello.epoch, tuple(events)))
            if not finish:
                await connection.until(b"data: ", num_times=2 + 2 * index)
        reply = parse_reply(await connection.to_end())
    assert [piece.count(b"data: ") for piece in reply.pieces] == [1, 1, 2, 2, 3]  # the last of them is [DONE]


async def test_every_answer_has_a_request_id_of_its_own(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(_saying(prompts))
    replies = [
        await post_chat(server, stream=True),
        await post_chat(server),
        await post_chat(server, temperature=9),
        await fetch(server, "GET", "/health"),
        await fetch(server, "GET", "/metrics", headers={"x-request-id": "not sane"}),
        await fetch(server, "GET", "/nowhere"),
        await fetch(server, "PUT", "/v1/completions"),
    ]
    ids = {reply.headers["x-request-id"] for reply in replies}
    assert len(ids) == len(replies)
    assert all(len(request_id) == 32 for request_id in ids)


async def test_a_connection_serves_one_request_after_another(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(_saying(prompts))
    body = json.dumps(completion_body(stream=True)).encode()
    async with connected(server) as connection:
        for _ in range(2):
            connection.received.clear()
            await connection.send(request_bytes("POST", "/v1/completions", body, is_last=False))
            assert _content(parse_reply(await connection.until(b"[DONE]\n\n\r\n0\r\n\r\n")).chunks) == TEXT


async def test_a_long_prompt_is_prepared_off_the_event_loop(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(_saying(prompts))
    reply = await post_completion(server, prompt="word " * 2000)
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


async def test_text_in_any_language_survives_the_stream(server: Server, prompts: PromptMaker) -> None:
    text = "Grüße, 世界 \U0001f30d\u2028 done"
    await server.rig.pair(_saying(prompts, text, finish="length"))
    assert _content((await post_chat(server, stream=True)).chunks) == text
    assert (await post_chat(server)).json()["choices"][0]["message"]["content"] == text
