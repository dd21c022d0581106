"""Requests that are wrong, each beside a good stream that must not notice: status, code and field of the answer."""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.serving import body_reader
from baton.router.http.serving.limits import HttpLimits
from baton.wire.messages.legs import Decode
from baton.wire.messages.membership import DECODE
from tests.router.http_client import Reply, chat_body, completion_body, connected, fetch, parse_reply, request_bytes
from tests.router.rig import DEFAULTS, Server, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_BODY_BYTES = 2**21
LIMITS = HttpLimits(max_body_bytes=MAX_BODY_BYTES)
UNBOUNDED = 10**400


@dataclass(frozen=True, slots=True)
class Raw:
    """A request that is wrong before its fields are looked at."""

    body: bytes
    status: int = 400
    code: str | None = None
    headers: tuple[tuple[str, str], ...] = ()


GOOD = json.dumps(chat_body()).encode()

RAW = {
    "1 invalid JSON": Raw(b'{"model":', code="invalid_json"),
    "6 no content type": Raw(GOOD, 415, "unsupported_media_type", (("content-type", ""),)),
    "7 utf-16": Raw(GOOD, 415, None, (("content-type", "application/json; charset=utf-16"),)),
    "11 deep nesting inside": Raw(b'{"metadata": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001),
    "14 one byte too many": Raw(b" " * (MAX_BODY_BYTES + 1), 413, "request_too_large"),
    "16 gzip bomb": Raw(gzip.compress(b" " * 20 * 2**20), 413, None, (("content-encoding", "gzip"),)),
    "16 not gzip": Raw(GOOD, 400, None, (("content-encoding", "gzip"),)),
    "16 unknown encoding": Raw(GOOD, 415, None, (("content-encoding", "snappy"),)),
}

# One of each kind, and what is known only where nodes and a vocabulary are; test_schemas.py has all of them.
# The number of the case of bad_inputs, the path, members that differ from a good request, the param of the error
FIELDS: list[tuple[str, str, dict[str, Any], str]] = [
    ("29", CHAT, {"model": ...}, "model"),
    ("34", CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ("36", CHAT, {"messages": [{"role": "user", "content": "x" * (2**20 + 1)}]}, "messages[0].content"),
    ("38", COMPLETIONS, {"prompt": [320]}, "prompt"),
    ("67", CHAT, {"kv_transfer_params": {"remote_host": "10.0.0.1"}}, "kv_transfer_params"),
    ("41", CHAT, {"functions": [{"name": "f"}]}, "functions"),
    ("41", CHAT, {"chat_template": "{{ x }}"}, "chat_template"),
    ("42", CHAT, {"stream": "true"}, "stream"),
    ("44", CHAT, {"temperature": 2.1}, "temperature"),
    ("45", CHAT, {"top_p": 0}, "top_p"),
    ("50", CHAT, {"n": UNBOUNDED}, "n"),
    ("50", COMPLETIONS, {"prompt": ["x", "y"], "n": 65}, "n"),
    ("52", COMPLETIONS, {"prompt": [5] * 250, "max_tokens": 10_000, "min_tokens": 7}, "min_tokens"),
    ("54", COMPLETIONS, {"prompt": [5] * 300}, "prompt"),
    ("54", CHAT, {"messages": [{"role": "user", "content": "words " * 300}]}, "messages"),
    ("55", COMPLETIONS, {"prompt": [[5], [5] * 256], "max_tokens": 7}, "prompt"),
    ("56", COMPLETIONS, {"prompt": [5] * 256, "max_tokens": None}, "prompt"),
    ("60", CHAT, {"logit_bias": {"320": 1}}, "logit_bias"),
    ("60", CHAT, {"logit_bias": {str(key): 1 for key in range(50_000)}}, "logit_bias"),
    ("62", CHAT, {"stop_token_ids": [320]}, "stop_token_ids"),
    ("69", CHAT, {"stream": True, "stream_options": {"colour": 1}}, "stream_options.colour"),
]

# The other cases, asked on one server all at once
MORE_FIELDS: list[tuple[str, str, dict[str, Any], str]] = [
    ("31", CHAT, {"model": 7}, "model"),
    ("31", CHAT, {"model": ""}, "model"),
    ("31", CHAT, {"model": "x" * 2**20}, "model"),
    ("32", CHAT, {"messages": ...}, "messages"),
    ("32", COMPLETIONS, {"prompt": ...}, "prompt"),
    ("33", CHAT, {"messages": []}, "messages"),
    ("33", CHAT, {"messages": {}}, "messages"),
    ("33", CHAT, {"messages": None}, "messages"),
    ("34", CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ("34", CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
    ("34", CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        "35",
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].image_url",
    ),
    ("37", COMPLETIONS, {"prompt": ""}, "prompt"),
    ("37", COMPLETIONS, {"prompt": []}, "prompt"),
    ("37", COMPLETIONS, {"prompt": [""]}, "prompt[0]"),
    ("37", COMPLETIONS, {"prompt": [[]]}, "prompt[0]"),
    ("38", COMPLETIONS, {"prompt": [-1]}, "prompt"),
    ("38", COMPLETIONS, {"prompt": [1.5]}, "prompt"),
    ("38", COMPLETIONS, {"prompt": [True]}, "prompt"),
    ("38", COMPLETIONS, {"prompt": ["x", 5]}, "prompt"),
    ("39", COMPLETIONS, {"prompt": ["x"] * 129}, "prompt"),
    ("42", CHAT, {"n": "2"}, "n"),
    ("42", CHAT, {"n": 1.0}, "n"),
    ("42", CHAT, {"n": True}, "n"),
    ("44", CHAT, {"temperature": -0.1}, "temperature"),
    ("45", CHAT, {"top_p": 1.1}, "top_p"),
    ("45", CHAT, {"top_p": -1}, "top_p"),
    ("46", CHAT, {"top_k": -2}, "top_k"),
    ("46", CHAT, {"top_k": 1.5}, "top_k"),
    ("46", CHAT, {"top_k": 2**31}, "top_k"),
    ("47", CHAT, {"min_p": 1.1}, "min_p"),
    ("47", CHAT, {"min_p": -0.1}, "min_p"),
    ("48", CHAT, {"presence_penalty": 2.1}, "presence_penalty"),
    ("48", CHAT, {"frequency_penalty": -2.1}, "frequency_penalty"),
    ("49", CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
    *[("50", CHAT, {"n": count}, "n") for count in (0, -1, 129, 2**31, 10**18)],
    *[("51", COMPLETIONS, {"n": 2, "best_of": count}, "best_of") for count in (1, 21, 2**63)],
    ("51", COMPLETIONS, {"best_of": 2, "stream": True}, "best_of"),
    ("51", COMPLETIONS, {"best_of": 20, "prompt": ["x"] * 7}, "best_of"),
    *[("52", CHAT, {"max_tokens": count}, "max_tokens") for count in (-1, 0, 2**63, UNBOUNDED)],
    ("53", CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    ("57", COMPLETIONS, {"prompt": [[5], [5] * 1024]}, "prompt"),
    ("58", CHAT, {"seed": 2**63}, "seed"),
    ("58", CHAT, {"seed": 1.5}, "seed"),
    ("59", COMPLETIONS, {"logprobs": 6}, "logprobs"),
    ("59", CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("59", CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ("59", CHAT, {"top_logprobs": 2}, "top_logprobs"),
    ("60", CHAT, {"logit_bias": {"5": 100.1}}, "logit_bias"),
    ("60", CHAT, {"logit_bias": {"AI": 1}}, "logit_bias"),
    ("61", CHAT, {"stop": ["x", None]}, "stop"),
    ("61", CHAT, {"stop": [5]}, "stop"),
    ("61", CHAT, {"stop": "x" * 2**20}, "stop"),
    ("63", CHAT, {"min_tokens": -1}, "min_tokens"),
    ("63", CHAT, {"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ("64", COMPLETIONS, {"max_tokens": 0, "logprobs": 1}, "max_tokens"),
    *[("65", CHAT, {"cache_salt": salt}, "cache_salt") for salt in ("", "s" * 2048, "../", "\U0001f600")],
    ("66", CHAT, {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    ("66", CHAT, {"guided_regex": "a" * 2**18}, "guided_regex"),
    ("67", CHAT, {"request_id": "x"}, "request_id"),
    ("67", CHAT, {"bootstrap_room": 1}, "bootstrap_room"),
    ("68", CHAT, {"user": {}}, "user"),
    ("68", CHAT, {"metadata": {"a": "x" * 2**20}}, "metadata"),
    ("69", CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
]

ACCEPTED: list[tuple[str, str, dict[str, Any]]] = [
    ("13", CHAT, {"messages": [{"role": "user", "content": "a\x00b\x1b"}]}),
    ("40", CHAT, {"unheard_of": 1}),
    ("43", CHAT, {"temperature": None, "n": None, "stop": None}),
    ("45", CHAT, {"top_p": 1, "top_k": 0}),
    ("50", COMPLETIONS, {"n": 128}),
    ("52", COMPLETIONS, {"max_tokens": 10_000}),
    ("55", COMPLETIONS, {"prompt": [5] * 250, "max_tokens": 7}),
    ("56", COMPLETIONS, {"prompt": [5] * 255, "max_tokens": 1}),
    ("58", CHAT, {"seed": -1}),
    ("58", CHAT, {"seed": 2**63 - 1}),
    ("64", COMPLETIONS, {"prompt": [5], "echo": True, "max_tokens": 0}),
]

UNKNOWN_PATHS = ("//v1", "/v1/../v1x", "/v1/%2e%2e/secret", "/v1", "/%00", "/v1/chat/completions//", "/V1/models")


async def _beside_a_stream(prompts: PromptMaker, request: Any, limits: HttpLimits = LIMITS) -> Reply:
    """What `request(server)` is answered in the middle of a good stream, whose text is checked."""
    ids = prompts.tokenizer.encode("the good stream")
    async with serving(prompts, replace(DEFAULTS, max_concurrent_requests=200), limits) as server:

        def script(node: Any, leg: Any) -> None:
            if leg.params.seed == 4711:
                node.emit(leg, ids[:3])
            else:
                node.emit(leg, [5], finish="length")

        decode = await server.rig.join(DECODE, script)
        async with connected(server) as connection:
            body = json.dumps(completion_body(stream=True, seed=4711)).encode()
            await connection.send(request_bytes("POST", COMPLETIONS, body))
            leg = await decode.expect(Decode)
            await connection.until(b"data: ")
            reply: Reply = await request(server)
            decode.emit(leg, ids, 0, finish="length")
            good = parse_reply(await connection.to_end())
        assert "".join(chunk["choices"][0]["text"] for chunk in good.chunks) == "the good stream"
        await server.rig.settle()
        return reply


def changed_body(path: str, members: dict[str, Any]) -> bytes:
    body = (chat_body if path == CHAT else completion_body)(**members)
    text = json.dumps({name: value for name, value in body.items() if value is not ...})
    return text.encode()


@pytest.mark.parametrize("case", RAW.values(), ids=RAW.keys())
async def test_bodies_that_cannot_be_read(prompts: PromptMaker, case: Raw) -> None:
    reply = await _beside_a_stream(prompts, lambda server: fetch(server, "POST", CHAT, case.body, dict(case.headers)))
    assert (reply.status, reply.error["type"]) == (case.status, "invalid_request_error")
    assert case.code in (None, reply.error["code"])


@pytest.mark.parametrize(
    ("path", "members", "param"), [case[1:] for case in FIELDS], ids=[f"{i}-{case[0]}" for i, case in enumerate(FIELDS)]
)
async def test_fields_that_are_wrong(prompts: PromptMaker, path: str, members: dict[str, Any], param: str) -> None:
    body = changed_body(path, members)
    reply = await _beside_a_stream(prompts, lambda server: fetch(server, "POST", path, body))
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert reply.error["param"] == param
    assert len(reply.body) < 2000


@pytest.mark.parametrize(("path", "members"), [case[1:] for case in ACCEPTED], ids=[case[0] for case in ACCEPTED])
async def test_fields_at_the_edge_of_what_is_allowed(prompts: PromptMaker, path: str, members: dict[str, Any]) -> None:
    reply = await _beside_a_stream(prompts, lambda server: fetch(server, "POST", path, changed_body(path, members)))
    assert reply.status == 200


async def test_an_unknown_model_is_not_found(prompts: PromptMaker) -> None:
    body = changed_body(CHAT, {"model": "gpt-0"})
    reply = await _beside_a_stream(prompts, lambda server: fetch(server, "POST", CHAT, body))
    assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")


@pytest.mark.parametrize("path", UNKNOWN_PATHS)
async def test_unknown_paths_are_not_found(prompts: PromptMaker, path: str) -> None:
    reply = await _beside_a_stream(prompts, lambda server: fetch(server, "GET", path))
    assert (reply.status, reply.error["code"]) == (404, "not_found")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_methods_that_a_path_does_not_take(prompts: PromptMaker, path: str, method: str) -> None:
    reply = await _beside_a_stream(prompts, lambda server: fetch(server, method, path))
    assert (reply.status, reply.error["code"], reply.headers["allow"]) == (405, "method_not_allowed", "POST")


async def test_a_byte_order_mark_is_answered_as_invalid_json(prompts: PromptMaker) -> None:
    reply = await _beside_a_stream(prompts, lambda server: fetch(server, "POST", CHAT, b"\xef\xbb\xbf" + GOOD))
    assert reply.status in (200, 400)


async def test_a_chunked_body_over_the_limit_is_refused(prompts: PromptMaker) -> None:
    async def send(server: Server) -> Reply:
        headers = {"content-length": "", "transfer-encoding": "chunked"}
        async with connected(server) as connection:
            await connection.send(request_bytes("POST", CHAT, headers=headers))
            for _ in range(40):
                await connection.send(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
            await connection.send(b"0\r\n\r\n")
            return parse_reply(await connection.to_end())

    reply = await _beside_a_stream(prompts, send)
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")


async def test_a_body_that_never_ends_times_out(prompts: PromptMaker) -> None:
    async def send(server: Server) -> Reply:
        async with connected(server) as connection:
            await connection.send(request_bytes("POST", CHAT, b"{", {"content-length": "100"}, is_last=False))
            return parse_reply(await connection.until(b"}}"))

    reply = await _beside_a_stream(prompts, send, replace(LIMITS, body_stall_s=0.2))
    assert (reply.status, reply.error["code"]) == (408, "request_timeout")


async def test_the_time_that_the_router_needs_for_a_body_is_not_the_clients(
    prompts: PromptMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = body_reader._Plain.add

    async def take_slowly(intake: body_reader._Plain, piece: bytes) -> None:
        await asyncio.sleep(0.3)
        await take(intake, piece)

    async def send(server: Server) -> Reply:
        with monkeypatch.context() as slow:
            slow.setattr(body_reader._Plain, "add", take_slowly)
            return await fetch(server, "POST", CHAT, b"{")

    reply = await _beside_a_stream(prompts, send, replace(LIMITS, body_stall_s=0.2))
    assert reply.status == 400, reply.error


async def test_many_wrong_requests_at_once_affect_no_other_request(prompts: PromptMaker) -> None:
    cases = [*FIELDS, *MORE_FIELDS]
    replies: list[Reply] = []

    async def send(server: Server) -> Reply:
        asked = [fetch(server, "POST", path, changed_body(path, members)) for _, path, members, _ in cases]
        replies.extend(await asyncio.gather(*asked))
        return replies[0]

    await _beside_a_stream(prompts, send)
    for (case, _, _, param), reply in zip(cases, replies, strict=True):
        error = reply.error
        found = (case, reply.status, error["type"], error["param"])
        assert found == (case, 400, "invalid_request_error", param)
        assert len(reply.body) < 2000
