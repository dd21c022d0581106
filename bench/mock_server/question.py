"""What a request asks the mock server for. Reads as much of a body as its answer depends on and lets the rest pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wire.errors import InvalidRequest

_DEFAULT_OUTPUT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Question:
    """`num_prompt_tokens` counts ids, or words where the prompt is text."""

    is_chat: bool
    model: str
    num_prompt_tokens: int
    num_output_tokens: int
    is_stream: bool
    with_usage: bool
    with_token_ids: bool
    with_timings: bool


def read_question(body: Any, is_chat: bool) -> Question:
    """Read a body. Raises `InvalidRequest`."""
    if not isinstance(body, dict):
        raise InvalidRequest("the body is no JSON object")
    limit = body.get("max_tokens") or body.get("max_completion_tokens") or _DEFAULT_OUTPUT_TOKENS
    if type(limit) is not int or limit < 1:
        raise InvalidRequest(f"{limit!r:.40} is no number of tokens", "max_tokens")
    options = body.get("stream_options")
    return Question(
        is_chat=is_chat,
        model=str(body.get("model", "")),
        num_prompt_tokens=_num_chat_words(body.get("messages")) if is_chat else _num_tokens(body.get("prompt")),
        num_output_tokens=limit,
        is_stream=bool(body.get("stream")),
        with_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        with_token_ids=bool(body.get("return_token_ids")),
        with_timings=bool(body.get("return_timings")),
    )


def _num_tokens(prompt: Any) -> int:
    if isinstance(prompt, str) and prompt:
        return len(prompt.split())
    if isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
        return len(prompt)
    raise InvalidRequest("a text or a list of token ids is needed", "prompt")


def _num_chat_words(messages: Any) -> int:
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise InvalidRequest("a list of messages is needed", "messages")
    return sum(len(str(message.get("content", "")).split()) for message in messages)
