"""Fields that change nothing: ignored and named in a warning, refused by a strict router."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.router.http.openai.ignored import OTHER, IgnoredFields
from baton.router.http.openai.request_body import parse_body
from baton.router.http.openai.schemas import ChatCompletionRequest
from baton.wire.errors import InvalidRequest

USER = {"role": "user", "content": "hi"}


def _parse(notes: IgnoredFields, members: dict[str, Any]) -> ChatCompletionRequest:
    body = {"model": "m", "messages": [USER], **members}
    return parse_body(json.dumps(body).encode(), "application/json", ChatCompletionRequest, notes)


def _paths(notes: IgnoredFields) -> list[str]:
    return [warning.partition(" is ignored: ")[0] for warning in notes.warnings]


IGNORED: list[tuple[dict[str, Any], str]] = [
    *(
        ({name: "x"}, name)
        for name in ("cache_control", "chat_id", "session_id", "keep_alive", "user", "safety_identifier", "verbosity")
    ),
    ({"think": True}, "think"),
    ({"store": True}, "store"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"opts": {"a": 1}}, "opts"),
    ({"metadata": {"k": "v"}}, "metadata"),
    ({"messages": [{**USER, "id": "1"}]}, "messages[].id"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}]},
        "messages[].content[].cache_control",
    ),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
]
UNKNOWN: list[tuple[dict[str, Any], str, str]] = [
    ({"colour": 1}, "colour", "colour"),
    ({"c" * 1000: 1}, "c" * 64, "c" * 64),
    ({"messages": [{**USER, "mood": "sad"}]}, "messages[].mood", "messages[0].mood"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "lang": "en"}]}]},
        "messages[].content[].lang",
        "messages[0].content[0].lang",
    ),
]


@pytest.mark.parametrize(("members", "path"), IGNORED, ids=[case[1] for case in IGNORED])
def test_what_only_tags_or_tunes_elsewhere_is_ignored(members: dict[str, Any], path: str) -> None:
    notes = IgnoredFields()
    _parse(notes, members)
    assert _paths(notes) == [path]
    assert notes.labels == {path}
    with pytest.raises(InvalidRequest) as caught:
        _parse(IgnoredFields(is_strict=True), members)
    assert caught.value.code == "unsupported_parameter"


@pytest.mark.parametrize(("members", "path", "param"), UNKNOWN, ids=[case[1][:40] for case in UNKNOWN])
def test_what_nobody_knows_is_ignored(members: dict[str, Any], path: str, param: str) -> None:
    notes = IgnoredFields()
    _parse(notes, members)
    assert _paths(notes) == [path]
    assert notes.labels == {OTHER}
    with pytest.raises(InvalidRequest) as caught:
        _parse(IgnoredFields(is_strict=True), members)
    assert (caught.value.code, caught.value.param) == ("unknown_parameter", param)


CLIENTS: dict[str, dict[str, Any]] = {
    "Open WebUI": {
        "stream": True,
        "messages": [{**USER, "id": "a", "timestamp": 1, "models": ["m"]}],
        "chat_id": "c",
        "session_id": "s",
        "features": {"web_search": False},
        "variables": {"{{USER_NAME}}": "Ada"},
        "stream_options": {"include_usage": True},
    },
    "an editor": {
        "stream": True,
        "messages": [{**USER, "id": 1, "opts": {"visible": True}, "cycle": 1}],
        "opts": {"temperature": 0},
    },
    "an agent": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": "y", "reasoning_content": "z", "refusal": None, "annotations": []},
            USER,
        ],
        "reasoning_effort": "medium",
        "store": False,
        "parallel_tool_calls": False,
        "service_tier": None,
    },
    "guidellm": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_completion_tokens": 5,
        "max_tokens": 5,
        "stop": None,
        "ignore_eos": True,
    },
}


@pytest.mark.parametrize("members", CLIENTS.values(), ids=CLIENTS.keys())
def test_what_clients_are_known_to_send_is_taken(members: dict[str, Any]) -> None:
    _parse(IgnoredFields(), members).decoding_params()


def test_values_that_ask_for_nothing_are_no_matter_of_warnings() -> None:
    members = {"store": False, "service_tier": "auto", "user": None, "tools": [], "parallel_tool_calls": True}
    for notes in (IgnoredFields(), IgnoredFields(is_strict=True)):
        _parse(notes, members)
        assert (notes.warnings, notes.labels) == ((), frozenset())
    _parse(IgnoredFields(), {"colour": None, "kv_transfer_params": None})


def test_a_field_is_named_once_and_the_warnings_are_few() -> None:
    notes = IgnoredFields()
    _parse(notes, {"messages": [{**USER, "id": str(number)} for number in range(50)]})
    assert _paths(notes) == ["messages[].id"]
    _parse(notes, {f"field_{number}": 1 for number in range(10_000)})
    assert len(notes.warnings) == 17
    assert notes.warnings[-1] == "further fields were ignored"
    assert notes.labels == {"messages[].id", OTHER}
