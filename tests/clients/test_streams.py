"""Recorded streams are told from answers that say something else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.clients.streams import Told, check_streams, told_by_answer, told_by_stream

USAGE = {"prompt_tokens": 5, "completion_tokens": 2}
RESPONSE = {"usage": {"input_tokens": 5, "output_tokens": 2}, "output": [{"content": [{"text": "ab"}]}]}
STREAMS: dict[str, list[dict[str, Any]]] = {
    "completions": [
        {"choices": [{"text": "a"}], "usage": None},
        {"choices": [{"text": "b"}], "usage": None},
        {"choices": [], "usage": USAGE},
    ],
    "chat": [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "ab"}}]},
        {"choices": [{"delta": {}}]},
        {"choices": [], "usage": USAGE},
    ],
    "responses": [
        {"type": "response.created", "response": {"usage": None}},
        {"type": "response.output_text.delta", "delta": "a"},
        {"type": "response.output_text.delta", "delta": "b"},
        {"type": "response.output_text.done", "text": "ab"},
        {"type": "response.incomplete", "response": RESPONSE},
    ],
}
ANSWERS: dict[str, dict[str, Any]] = {
    "completions": {"choices": [{"text": "ab"}], "usage": USAGE},
    "chat": {"choices": [{"message": {"content": "ab"}}], "usage": USAGE},
    "responses": RESPONSE,
}


def _recorded(file: Path, events: Sequence[dict[str, Any]]) -> Path:
    packets = [[{"name": "data", "value": json.dumps(event)}] for event in events]
    responses = [{"packets": each} for each in [*packets, [{"name": "data", "value": "[DONE]"}]]]
    payload = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
    file.write_text(json.dumps({"responses": responses, "payload": payload}) + "\n")
    return file


@pytest.mark.parametrize("endpoint", STREAMS)
def test_a_stream_tells_what_its_answer_tells(endpoint: str, tmp_path: Path) -> None:
    assert told_by_stream(STREAMS[endpoint]) == told_by_answer(ANSWERS[endpoint]) == Told("ab", 5, 2)
    asked: list[object] = []

    def ask(body: object) -> dict[str, Any]:
        asked.append(body)
        return ANSWERS[endpoint]

    check_streams(_recorded(tmp_path / "raw.jsonl", STREAMS[endpoint]), ask, 1)
    assert asked == [{"model": "m"}]


@pytest.mark.parametrize("endpoint", STREAMS)
def test_another_text_another_usage_and_a_missing_stream_are_named(endpoint: str, tmp_path: Path) -> None:
    def ask(_: object) -> dict[str, Any]:
        return ANSWERS[endpoint]

    shorter = STREAMS[endpoint][:1] + STREAMS[endpoint][2:]
    with pytest.raises(ValueError, match="request 0: the stream told"):
        check_streams(_recorded(tmp_path / "raw.jsonl", shorter), ask, 1)
    with pytest.raises(ValueError, match=r"num_prompt_tokens=None"):
        check_streams(_recorded(tmp_path / "raw.jsonl", STREAMS[endpoint][:-1]), ask, 1)
    with pytest.raises(ValueError, match="1 streams were recorded, not 2"):
        check_streams(_recorded(tmp_path / "raw.jsonl", STREAMS[endpoint]), ask, 2)
