from __future__ import annotations

from typing import Any

import pytest
from bench.mock_server.question import Question, read_question

from wire.errors import InvalidRequest


def test_what_is_asked_is_read() -> None:
    body = {
        "model": "m",
        "prompt": [5, 6],
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "top_k": 4,
    }
    assert read_question(body, is_chat=False) == Question(False, "m", 2, 3, True, True, True, False)


def test_words_are_counted_where_there_are_no_ids() -> None:
    assert read_question({"prompt": "one two"}, is_chat=False).num_prompt_tokens == 2
    messages = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}]
    chat = read_question({"messages": messages, "max_completion_tokens": 9}, is_chat=True)
    assert (chat.num_prompt_tokens, chat.num_output_tokens) == (3, 9)


@pytest.mark.parametrize(
    ("body", "is_chat"),
    [
        ([], False),
        ({}, False),
        ({"prompt": ""}, False),
        ({"prompt": []}, False),
        ({"prompt": ["a"]}, False),
        ({"prompt": "a", "max_tokens": -1}, False),
        ({"prompt": "a", "max_tokens": "9"}, False),
        ({"messages": []}, True),
        ({"messages": ["a"]}, True),
        ({"prompt": "a"}, True),
    ],
)
def test_what_nobody_can_answer_is_refused(body: Any, is_chat: bool) -> None:
    with pytest.raises(InvalidRequest):
        read_question(body, is_chat)
