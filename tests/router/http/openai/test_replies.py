"""The official client's types read everything that is rendered here."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from baton.engine.text.choice_text import ScoredToken, TextDelta, TokenEntry
from baton.router.http.openai.logprob_formats import chat_logprobs, completion_logprobs
from baton.router.http.openai.replies import (
    SSE_DONE,
    ChatStream,
    CompletionStream,
    FinishedChoice,
    ReplyHead,
    chat_completion,
    json_bytes,
    sse_error,
    sse_event,
    text_completion,
)
from baton.router.http.openai.usage import Usage, usage_object
from baton.wire.errors import Overloaded
from baton.wire.messages.output import HandoffFigures

HEAD = ReplyHead("chatcmpl-1", 1_700_000_000, 'a "model"')
USAGE = Usage(10, 3, 4)
HELLO = ScoredToken("Hello", b"Hello", -0.5, 1)
HALF = ScoredToken("\ufffd", b"\xe2\x82", -1.5, 3)
PLAIN = TextDelta("Hello", (TokenEntry(1, 0),))
WITH_LOGPROBS = TextDelta("Hello", (TokenEntry(1, 0, HELLO, (HELLO, HALF)),))
ENDING = TextDelta("!", (TokenEntry(2, 5),), "length")


def _payload(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    payload: dict[str, Any] = json.loads(event[len(b"data: ") :])
    return payload


def _chat_chunk(event: bytes) -> ChatCompletionChunk:
    return ChatCompletionChunk.model_validate(_payload(event), strict=False)


async def test_a_chat_stream_from_role_to_usage() -> None:
    stream = ChatStream(HEAD, include_usage=True)
    events = (stream.begin(1), stream.chunk(1, PLAIN), stream.chunk(1, ENDING), await stream.usage(USAGE))
    first, middle, last, usage = map(_chat_chunk, events)
    assert {chunk.id for chunk in (first, middle, last, usage)} == {HEAD.reply_id}
    assert {(chunk.model, chunk.created) for chunk in (first, middle, last, usage)} == {(HEAD.model, HEAD.created)}
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert (middle.choices[0].index, middle.choices[0].delta.content) == (1, "Hello")
    assert (middle.choices[0].delta.role, middle.choices[0].finish_reason, middle.usage) == (None, None, None)
    assert (last.choices[0].delta.content, last.choices[0].finish_reason) == ("!", "length")
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.total_tokens == 13


def test_a_chat_stream_without_usage_does_not_mention_it() -> None:
    assert b"usage" not in ChatStream(HEAD).chunk(0, PLAIN)
    assert b'"usage":null' in ChatStream(HEAD, include_usage=True).chunk(0, PLAIN)


def test_an_ending_without_text_has_an_empty_delta() -> None:
    assert _payload(ChatStream(HEAD).chunk(0, TextDelta("", (), "stop")))["choices"][0]["delta"] == {}


async def test_a_completion_stream() -> None:
    stream = CompletionStream(HEAD)
    assert stream.begin(0) == b""
    last = Completion.model_validate(_payload(stream.chunk(2, ENDING)), strict=False)
    assert (last.choices[0].index, last.choices[0].text, last.choices[0].finish_reason) == (2, "!", "length")
    middle = _payload(stream.chunk(0, PLAIN))["choices"][0]
    assert middle == {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": None}
    usage = Completion.model_validate(_payload(await stream.usage(USAGE)), strict=False)
    assert (usage.choices, usage.object) == ([], "text_completion")


def test_logprobs_ride_on_the_chunk_of_their_text() -> None:
    chat = _chat_chunk(ChatStream(HEAD).chunk(0, WITH_LOGPROBS))
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    assert chat.choices[0].logprobs.content[0].token == "Hello"
    completion = _payload(CompletionStream(HEAD).chunk(0, WITH_LOGPROBS))["choices"][0]
    assert completion["logprobs"]["tokens"] == ["Hello"]


def test_token_ids_come_when_asked_for() -> None:
    for stream in (ChatStream(HEAD, with_token_ids=True), CompletionStream(HEAD, with_token_ids=True)):
        assert _payload(stream.begin(0, [7, 8]))["choices"][0]["prompt_token_ids"] == [7, 8]
        assert _payload(stream.chunk(0, PLAIN))["choices"][0]["token_ids"] == [1]


def test_a_whole_chat_answer() -> None:
    with_logprobs = TextDelta("Hello", WITH_LOGPROBS.entries, "length")
    choices = [FinishedChoice(0, TextDelta("Hi", (), "stop")), FinishedChoice(1, with_logprobs)]
    answer = ChatCompletion.model_validate_json(json_bytes(chat_completion(HEAD, choices, USAGE)), strict=False)
    assert [choice.message.content for choice in answer.choices] == ["Hi", "Hello"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


def test_usage_says_what_the_kv_transfer_took_when_there_was_one() -> None:
    figures = [HandoffFigures(4, 4096, 9000, 1250), HandoffFigures(2, 2048, 500, 2500)]
    assert usage_object(replace(USAGE, handoffs=figures))["kv_transfer"] == {
        "blocks": 6,
        "bytes": 6144,
        "transfer_ms": 9.0,
        "exposed_ms": 2.5,
    }
    assert "kv_transfer" not in usage_object(USAGE)


def test_a_whole_completion() -> None:
    choices = [FinishedChoice(0, TextDelta("Hello", WITH_LOGPROBS.entries, "stop"), prompt_ids=[7])]
    rendered = json.loads(json_bytes(text_completion(HEAD, choices, USAGE)))
    answer = Completion.model_validate(rendered, strict=False)
    assert (answer.choices[0].text, answer.object) == ("Hello", "text_completion")
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.text_offset == [0]
    assert (rendered["choices"][0]["prompt_token_ids"], rendered["choices"][0]["token_ids"]) == ([7], [1])


def test_chat_logprobs_keep_bytes_apart_that_text_cannot() -> None:
    logprobs = chat_logprobs(WITH_LOGPROBS.entries)
    assert logprobs is not None
    assert logprobs["content"][0]["top_logprobs"] == [
        {"token": "Hello", "bytes": [72, 101, 108, 108, 111], "logprob": -0.5},
        {"token": "\ufffd", "bytes": [226, 130], "logprob": -1.5},
    ]


def test_completion_logprobs_name_the_chosen_token_among_the_top() -> None:
    rare = ScoredToken("!", b"!", -9.0, 4)
    logprobs = completion_logprobs([TokenEntry(1, 0, rare, (HELLO, HALF)), TokenEntry(2, 1, HELLO, ())])
    assert logprobs == {
        "tokens": ["!", "Hello"],
        "token_logprobs": [-9.0, -0.5],
        "top_logprobs": [{"Hello": -0.5, "bytes:\\xe2\\x82": -1.5, "!": -9.0}, {"Hello": -0.5}],
        "text_offset": [0, 1],
    }


def test_completion_logprobs_keep_tokens_of_one_text_apart() -> None:
    first, second = ScoredToken("a", b"a", -1.0, 7), ScoredToken("a", b"a", -2.0, 8)
    halves = [HALF._replace(token_id=token_id, logprob=-float(token_id)) for token_id in (5, 6)]
    logprobs = completion_logprobs(
        [TokenEntry(8, 0, second, (first, second, *halves)), TokenEntry(1, 1, HELLO, (first, second))]
    )
    assert logprobs is not None
    assert logprobs["tokens"] == ["a", "Hello"]
    half = "bytes:\\xe2\\x82"
    assert logprobs["top_logprobs"] == [
        {"token_id:7": -1.0, "a": -2.0, half: -5.0, "token_id:6": -6.0},
        {"a": -1.0, "token_id:8": -2.0, "Hello": -0.5},
    ]


@pytest.mark.parametrize("logprob", [-math.inf, math.nan])
def test_log_probabilities_are_always_json(logprob: float) -> None:
    entry = TokenEntry(1, 0, ScoredToken("a", b"a", logprob, 1))
    event = ChatStream(HEAD).chunk(0, TextDelta("a", (entry,)))
    assert _payload(event)["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0
    assert b"Infinity" not in event
    assert b"NaN" not in event


@pytest.mark.parametrize("text", ["a\nb\r\n", "\u2028\u2029\u0085", '"\\', "\0\x1b", "€ 😀", "data: x\n\n"])
def test_an_event_is_one_line_whatever_the_text(text: str) -> None:
    token = ScoredToken(text, text.encode(), -1.0, 1)
    for delta in (TextDelta(text), TextDelta(text, (TokenEntry(1, 0, token),), "stop")):
        event = ChatStream(HEAD).chunk(0, delta)
        assert len(event.decode().splitlines()) == 2
        assert _payload(event)["choices"][0]["delta"]["content"] == text
    assert _payload(CompletionStream(HEAD).chunk(0, TextDelta(text)))["choices"][0]["text"] == text
    assert len(sse_event({"a": text}).decode().splitlines()) == 2


def test_text_is_not_escaped_to_ascii() -> None:
    assert "é€😀".encode() in ChatStream(HEAD).chunk(0, TextDelta("é€😀"))


def test_the_error_event_of_a_stream_has_the_envelope() -> None:
    assert _payload(sse_error(Overloaded("full")))["error"]["code"] == "overloaded"
    assert _payload(sse_error(ValueError("secret")))["error"]["code"] == "internal_error"
    assert SSE_DONE == b"data: [DONE]\n\n"


def test_json_survives_a_lone_surrogate() -> None:
    assert json_bytes({"a": "\ud800"}) == b'{"a":"?"}'
