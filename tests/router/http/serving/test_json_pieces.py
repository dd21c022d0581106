"""JSON in pieces: the same text as in one, made bit by bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from baton.router.http.serving.json_pieces import PIECE_CHARS, Items, json_pieces


def _plain(payload: dict[str, Any]) -> bytes:
    return json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode()


@pytest.mark.parametrize("payload", [
    {},
    {"a": 1, "b": "é\u2028", "c": None, "d": []},
    {"ids": list(range(10_000)), "more": {"ids": [1.5] * 600}},
    {"choices": [{"index": 0, "ids": list(range(300))}, {"index": 1, "ids": []}]},
])  # fmt: skip
def test_pieces_joined_are_the_compact_json(payload: dict[str, Any]) -> None:
    assert b"".join(json_pieces(payload)) == _plain(payload)


@pytest.mark.parametrize("count", [0, 1, 5000])
def test_items_are_an_array(count: int) -> None:
    objects = [{"token": "é", "bytes": [1, 2], "top": [{"a": number}]} for number in range(count)]
    payload = {"choices": [{"index": 0, "logprobs": {"content": Items(iter(objects)), "refusal": None}}], "last": 1}
    expected = {"choices": [{"index": 0, "logprobs": {"content": objects, "refusal": None}}], "last": 1}
    assert b"".join(json_pieces(payload)) == _plain(expected)


def test_items_are_made_no_earlier_than_they_are_written() -> None:
    made = 0

    def items() -> Iterator[str]:
        nonlocal made
        for _ in range(100):
            made += 1
            yield "x" * 1000

    pieces = json_pieces({"items": Items(items())})
    assert len(next(pieces)) < PIECE_CHARS + 2000
    assert made < 20


def test_a_lone_surrogate_is_written_as_a_question_mark() -> None:
    assert b"".join(json_pieces({"a": "\ud800"})) == b'{"a":"?"}'
