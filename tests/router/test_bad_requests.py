"""Requests that are wrong, each beside a good stream that must not notice: status, code and field of the answer."""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

from router.openai.prompts import PromptMaker
from tests.router.http_client import (
    Reply,
    chat_body,
    completion_body,
    connected,
    fetch,
    parse_reply,
    request_bytes,
)
from tests.router.rig import DEFAULTS, MODEL, Server, serving
from wire.messages import DECODE, Decode

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_BODY_BYTES = 2**21
NAN = float("nan")
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
    "2 empty body": Raw(b"", code="invalid_json"),
    "3 array": Raw(b"[]"),
    "3 string": Raw(b'"text"'),
    "3 number": Raw(b"7"),
    "4 invalid UTF-8": Raw(b'{"model": "\xff\xfe"}', code="invalid_json"),
    "6 text/plain": Raw(GOOD, 415, "unsupported_media_type", (("content-type", "text/plain"),)),
    "6 no content type": Raw(GOOD, 415, "unsupported_media_type", (("content-type", ""),)),
    "7 bogus charset": Raw(GOOD, 415, None, (("content-type", "application/json; charset=bogus"),)),
    "7 utf-16": Raw(GOOD, 415, None, (("content-type", "application/json; charset=utf-16"),)),
    "8 duplicate keys": Raw(b'{"model": "a", "model": "b"}'),
    "9 NaN": Raw(b'{"temperature": NaN}'),
    "9 Infinity": Raw(b'{"temperature": Infinity}'),
    "9 1e999": Raw(b'{"temperature": 1e999}'),
    "10 long integer": Raw(b'{"seed": ' + b"9" * 5000 + b"}"),
    "11 deep nesting": Raw(b"[" * 100_000 + b"]" * 100_000),
    "11 deep nesting inside": Raw(b'{"metadata": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001),
    "12 lone surrogate": Raw(json.dumps(chat_body(messages=[{"role": "user", "content": "\ud800"}])).encode()),
    "14 one byte too many": Raw(b" " * (MAX_BODY_BYTES + 1), 413, "request_too_large"),
    "16 gzip bomb": Raw(gzip.compress(b" " * 20 * 2**20), 413, None, (("content-encoding", "gzip"),)),
    "16 not gzip": Raw(GOOD, 400, None, (("content-encoding", "gzip"),)),
    "16 unknown encoding": Raw(GOOD, 415, None, (("content-encoding", "snappy"),)),
}

NO_PROMPTS: list[Any] = ["", [], [""], [[]]]
NO_TOKEN_IDS: list[Any] = [[-1], [320], [1.5], [True], ["a", 1], [2**32]]

# the case of bad_inputs, the path, members that differ from a good request (... removes one), the param of the error
FIELDS: list[tuple[str, str, dict[str, Any], str | None]] = [
    ("29", CHAT, {"model": ...}, "model"),
    ("31", CHAT, {"model": 7}, "model"),
    ("31", CHAT, {"model": ""}, "model"),
    ("31", CHAT, {"model": "m" * 2**20}, "model"),
    ("32", CHAT, {"messages": ...}, "messages"),
    ("32", COMPLETIONS, {"prompt": ...}, "prompt"),
    ("33", CHAT, {"messages": []}, "messages"),
    ("33", CHAT, {"messages": None}, "messages"),
    ("33", CHAT, {"messages": {}}, "messages"),
    ("34", CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
    ("34", CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ("34", CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ("34", CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ("35", CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, None),
    ("36", CHAT, {"messages": [{"role": "user", "content": "x" * (2**20 + 1)}]}, "messages[0].content"),
    *[("37", COMPLETIONS, {"prompt": prompt}, None) for prompt in NO_PROMPTS],
    *[("38", COMPLETIONS, {"prompt": prompt}, None) for prompt in NO_TOKEN_IDS],
    ("39", COMPLETIONS, {"prompt": ["x"] * 129}, "prompt"),
    ("40", CHAT, {"unheard_of": 1}, "unheard_of"),
    ("41", CHAT, {"tools": [{"type": "function"}]}, "tools"),
    ("41", CHAT, {"audio": {}}, "audio"),
    ("41", CHAT, {"functions": [{}]}, "functions"),
    ("42", CHAT, {"stream": "true"}, "stream"),
    *[("42", CHAT, {"n": value}, "n") for value in ("2", 1.0, True)],
    *[("44", CHAT, {"temperature": value}, "temperature") for value in (-0.1, 2.1, "1")],
    *[("45", CHAT, {"top_p": value}, "top_p") for value in (0, 1.1, -1)],
    *[("46", CHAT, {"top_k": value}, "top_k") for value in (-2, 1.5, 2**31, UNBOUNDED)],
    *[("47", CHAT, {"min_p": value}, "min_p") for value in (-0.1, 1.1)],
    *[("48", CHAT, {"presence_penalty": value}, "presence_penalty") for value in (-2.1, 2.1)],
    *[("48", CHAT, {"frequency_penalty": value}, "frequency_penalty") for value in (-2.1, 2.1)],
    *[("49", CHAT, {"repetition_penalty": value}, "repetition_penalty") for value in (0, -1, 10**9)],
    *[("50", CHAT, {"n": value}, "n") for value in (0, -1, 129, 2**31, 10**18, UNBOUNDED)],
    ("50", COMPLETIONS, {"prompt": ["x", "y"], "n": 65}, "n"),
    *[("51", COMPLETIONS, {"best_of": value}, "best_of") for value in (0, 2, 21)],
    *[("52", COMPLETIONS, {"max_tokens": value}, "max_tokens") for value in (0, -1, 2**63)],
    ("52", COMPLETIONS, {"max_tokens": 10_000}, "prompt"),
    ("53", CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ("54", COMPLETIONS, {"prompt": [5] * 300}, "prompt"),
    ("54", CHAT, {"messages": [{"role": "user", "content": "words " * 300}]}, "messages"),
    ("55", COMPLETIONS, {"prompt": [5] * 250, "max_tokens": 7}, "prompt"),
    ("56", COMPLETIONS, {"prompt": [5] * 256, "max_tokens": None}, "prompt"),
    *[("58", CHAT, {"seed": value}, "seed") for value in (2**63, 1.5, UNBOUNDED)],
    ("59", COMPLETIONS, {"logprobs": 6}, "logprobs"),
    ("59", COMPLETIONS, {"logprobs": "1"}, "logprobs"),
    ("59", CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("59", CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ("59", CHAT, {"top_logprobs": 2}, "top_logprobs"),
    *[("60", CHAT, {"logit_bias": {"5": value}}, None) for value in (100.1, -100.1, "1")],
    *[("60", CHAT, {"logit_bias": {key: 1}}, "logit_bias") for key in ("AI", "-1", "320", "1.5", "9" * 10)],
    ("60", CHAT, {"logit_bias": {str(key): 1 for key in range(100_000)}}, "logit_bias"),
    *[("61", CHAT, {"stop": stop}, "stop") for stop in (["x"] * 17, "", [""], ["x", None], "x" * 2**20, [1])],
    ("62", CHAT, {"stop_token_ids": [320]}, "stop_token_ids"),
    ("63", CHAT, {"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ("63", CHAT, {"min_tokens": -1}, "min_tokens"),
    ("64", COMPLETIONS, {"echo": True, "max_tokens": 0, "logprobs": 1}, "echo"),
    *[("65", CHAT, {"cache_salt": salt}, "cache_salt") for salt in ("", "x" * 2048, "../", "\U0001f600")],
    ("66", CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
    ("66", CHAT, {"guided_regex": "(a+)+$"}, "guided_regex"),
    *[("67", CHAT, {name: "x"}, name) for name in ("kv_transfer_params", "bootstrap_room", "request_id")],
    ("68", CHAT, {"user": {}}, "user"),
    ("68", CHAT, {"user": "x" * 2**20}, "user"),
    ("68", CHAT, {"metadata": {"a": "x" * 2**20}}, "metadata"),
    ("69", CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    ("69", CHAT, {"stream": True, "stream_options": {"colour": 1}}, "stream_options.colour"),
]

ACCEPTED: list[tuple[str, str, dict[str, Any]]] = [
    ("13", CHAT, {"messages": [{"role": "user", "content": "a\x00b\x1b"}]}),
    ("43", CHAT, {"temperature": None, "n": None, "stop": None, "seed": None, "stream": None, "user": None}),
    ("46", CHAT, {"top_k": 0}),
    ("50", COMPLETIONS, {"n": 128}),
    ("56", COMPLETIONS, {"prompt": [5] * 255, "max_tokens": 1}),
    ("58", CHAT, {"seed": -1}),
    ("58", CHAT, {"seed": 2**63 - 1}),
    ("59", COMPLETIONS, {"logprobs": 5}),
    ("69", CHAT, {"stream": True, "stream_options": {"include_usage": True}}),
]

UNKNOWN_PATHS = ("//v1", "/v1/../v1x", "/v1/%2e%2e/secret", "/v1", "/%00", "/v1/chat/completions/", "/V1/models")


async def _beside_a_stream(prompts: PromptMaker, request: Any) -> Reply:
    """What `request(server)` is answered in the middle of a good stream, whose text is checked."""
    ids = prompts.tokenizer.encode("the good stream")
    async with serving(prompts, replace(DEFAULTS, max_concurrent_requests=200), MAX_BODY_BYTES) as server:

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


def _changed(path: str, members: dict[str, Any]) -> bytes:
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
async def test_fields_that_are_wrong(
    prompts: PromptMaker, path: str, members: dict[str, Any], param: str | None
) -> None:
    body = _changed(path, members)
    reply = await _beside_a_stream(prompts, lambda server: fetch(server, "POST", path, body))
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert reply.error["param"] is not None
    assert param in (None, reply.error["param"])
    assert len(reply.body) < 2000


@pytest.mark.parametrize(("path", "members"), [case[1:] for case in ACCEPTED], ids=[case[0] for case in ACCEPTED])
async def test_fields_at_the_edge_of_what_is_allowed(prompts: PromptMaker, path: str, members: dict[str, Any]) -> None:
    reply = await _beside_a_stream(prompts, lambda server: fetch(server, "POST", path, _changed(path, members)))
    assert reply.status == 200


async def test_an_unknown_model_is_not_found(prompts: PromptMaker) -> None:
    body = _changed(CHAT, {"model": "gpt-0"})
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


async def test_a_body_that_never_ends_times_out(prompts: PromptMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.openai.endpoints.BODY_TIMEOUT_S", 0.2)

    async def send(server: Server) -> Reply:
        async with connected(server) as connection:
            await connection.send(request_bytes("POST", CHAT, b"{", {"content-length": "100"}, is_last=False))
            return parse_reply(await connection.until(b"}}", within_s=2.0))

    reply = await _beside_a_stream(prompts, send)
    assert (reply.status, reply.error["code"]) == (408, "request_timeout")


async def test_many_wrong_requests_at_once_hurt_nobody(prompts: PromptMaker) -> None:
    async def send(server: Server) -> Reply:
        replies = await asyncio.gather(
            *[fetch(server, "POST", path, _changed(path, members)) for _, path, members, _ in FIELDS]
        )
        assert {reply.status for reply in replies} == {400}
        return replies[0]

    await _beside_a_stream(prompts, send)


def test_the_name_of_the_model_has_a_slash() -> None:
    assert "/" in MODEL
