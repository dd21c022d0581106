from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.client.outcome import Failure, Outcome
from baton.bench.client.stream import AnswerReader, Received, error_message, find_problem

DONE = b"data: [DONE]\n\n"


def event(choice: dict[str, Any] | None = None, **members: Any) -> bytes:
    choices = [] if choice is None else [choice]
    return b"data: " + json.dumps({"choices": choices, **members}).encode() + b"\n\n"


def read(*pieces: bytes, events_at_once: int = 2) -> tuple[Outcome, bool]:
    """Piece i came at second i. Whether [DONE] was seen stands second."""
    received, outcome = Received(), Outcome(0, 0, "", 0.0)
    for came_s, piece in enumerate(pieces):
        received.add(piece, float(came_s))
    reader = AnswerReader(received, outcome)
    for _ in reader.read(events_at_once):
        pass
    return outcome, reader.is_done


WHOLE = (
    event({"text": "a\u00e9"})
    + b": a comment\n\n"
    + event({"text": ""})
    + event({"text": "\n\ndata: [DONE]", "finish_reason": "length"})
    + event(usage={"completion_tokens": 3})
    + DONE
)


@given(st.lists(st.integers(1, len(WHOLE) - 1), max_size=8))
def test_how_a_stream_is_cut_changes_no_token(cuts: list[int]) -> None:
    edges = [0, *sorted(set(cuts)), len(WHOLE)]
    pieces = [WHOLE[begin:end] for begin, end in pairwise(edges)]
    outcome, is_done = read(*pieces)
    assert is_done
    assert outcome.text == "a\u00e9\n\ndata: [DONE]"
    assert outcome.chunk_tokens == [1, 1, 1]
    assert (outcome.finish_reason, outcome.usage) == ("length", {"completion_tokens": 3})
    last_bytes = [WHOLE.index(b"\n\n" + following) - 1 for following in (b": a", b'data: {"choices": [{"text": "\\n')]
    for place, last_byte in enumerate(last_bytes):
        assert outcome.chunk_s[place] == next(i for i, end in enumerate(edges[1:]) if end > last_byte)


def test_an_event_counts_the_tokens_whose_ids_it_names() -> None:
    outcome, _ = read(
        event({"text": "", "prompt_token_ids": [7, 8]}),
        event({"text": "ab", "token_ids": [1, 2]}),
        event({"text": "c", "token_ids": []}),
        event({"text": "", "token_ids": [3], "finish_reason": None}),
        event({"text": "", "finish_reason": "stop"}),
        DONE,
    )
    assert outcome.chunk_tokens == [0, 2, 0, 1, 0]
    assert outcome.output_ids == [1, 2, 3]
    assert outcome.chunk_s[0] == 0.0  # the first event with choices all the same


def test_a_chat_opens_without_a_token() -> None:
    outcome, _ = read(
        event({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}),
        event({"delta": {"content": "x"}}),
        event({"delta": {}, "finish_reason": "stop"}),
        DONE,
    )
    assert (outcome.text, outcome.chunk_tokens) == ("x", [0, 1, 1])


@pytest.mark.parametrize(
    ("data", "failure", "message"),
    [
        (b'{"choices": [{]}', Failure.BAD_STREAM, "not JSON: "),
        (b"\xff\xfe", Failure.BAD_STREAM, "not JSON: "),
        (b"[" * 100_000, Failure.BAD_STREAM, "not JSON: "),
        (b"17", Failure.BAD_STREAM, "no object: 17"),
        (b'{"choices": {"text": "x"}}', Failure.BAD_STREAM, "unknown choices"),
        (b'{"choices": ["x"]}', Failure.BAD_STREAM, "unknown choices"),
        (b'{"choices": [{"text": 5}]}', Failure.BAD_STREAM, "unknown members"),
        (b'{"choices": [{"text": "", "token_ids": ["x"]}]}', Failure.BAD_STREAM, "unknown members"),
        (b'{"error": {"message": "out of memory", "code": 500}}', Failure.ERROR_EVENT, "out of memory"),
        (b'{"error": "out of memory"}', Failure.ERROR_EVENT, "out of memory"),
        (b'{"object": "error", "message": "out of memory"}', Failure.ERROR_EVENT, "out of memory"),
    ],
)
def test_what_cannot_be_read_ends_the_answer(data: bytes, failure: Failure, message: str) -> None:
    outcome, is_done = read(event({"text": "a"}), b"data: " + data + b"\n\n", event({"text": "b"}), DONE)
    assert outcome.failure is failure
    assert message in outcome.message
    assert (outcome.text, is_done) == ("a", False)


def answered(usage: dict[str, Any], ids: list[int] | None = None, num_chunks: int = 3) -> Outcome:
    outcome = Outcome(0, 0, "", 0.0, usage=usage, output_ids=ids or [])
    outcome.chunk_s, outcome.chunk_tokens = [0.0] * num_chunks, [1] * num_chunks
    return outcome


@pytest.mark.parametrize(
    ("usage", "ids", "body", "message"),
    [
        ({"completion_tokens": 4}, [1, 2, 3], {}, "4 completion tokens, but 3 came"),
        (
            {"completion_tokens": 3},
            None,
            {"max_tokens": 5, "ignore_eos": True},
            "3 completion tokens, but 5 were to come",
        ),
        (
            {"completion_tokens": 3},
            None,
            {"max_completion_tokens": 5, "ignore_eos": True},
            "3 completion tokens, but 5 were to come",
        ),
        ({"prompt_tokens": 9}, None, {"prompt": [1, 2]}, "9 prompt tokens, but 2 were sent"),
    ],
)
def test_usage_that_differs_is_named(
    usage: dict[str, Any], ids: list[int] | None, body: dict[str, Any], message: str
) -> None:
    assert find_problem(answered(usage, ids), body) == (Failure.WRONG_USAGE, message)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no room", "type": "x"}}', "no room"),
        (b'{"object": "error", "message": "no room"}', "no room"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b"<html>Bad Gateway", "<html>Bad Gateway"),
        (b'{"reason": 1}', "{'reason': 1}"),
        (b"", ""),
        (b"\xff" * 1000, "\ufffd" * 200),
    ],
)
def test_the_sentence_of_an_error_is_found(body: bytes, message: str) -> None:
    assert error_message(body) == message
