"""What a request asks the mock server for, and the bytes of its answer in OpenAI's format. Knows no socket.

Reads as much of a body as its answer depends on and lets the rest pass. Baton's own members of `usage` are made up:
shares of the times at which chunks were really written, so that they fit to what the client sees.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from bench.mock_server.schedule import Answer, FaultKind
from program.clock import host_clock

DONE = b"data: [DONE]\n\n"
_DEFAULT_OUTPUT_TOKENS = 16
_FIRST_TOKEN_ID = 100
_KV_BYTES = 2**20
# shares of the time to the first token, then of the gap to the second
_TO_FIRST = {
    "received_us": 0.0,
    "sent_us": 0.02,
    "prefill_begun_us": 0.20,
    "first_sampled_us": 0.95,
    "first_written_us": 1.0,
}
_TO_SECOND = {"kv_ready_us": 0.30, "decode_begun_us": 0.40, "second_sampled_us": 0.90, "second_written_us": 1.0}
_Limit = Annotated[int, Field(strict=True, ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The members of a body that matter."""

    model: str = ""
    max_tokens: _Limit | None = None
    max_completion_tokens: _Limit | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = field(default_factory=dict)
    return_token_ids: bool = False
    return_timings: bool = False

    @property
    def num_output_tokens(self) -> int:
        """Tokens that are asked for."""
        return self.max_tokens or self.max_completion_tokens or _DEFAULT_OUTPUT_TOKENS

    @property
    def is_chat(self) -> bool:
        """Whether messages are asked and answered."""
        return isinstance(self, ChatQuestion)

    @property
    def num_prompt_tokens(self) -> int:
        """Ids, or words where the prompt is text."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionQuestion(Question):
    """Of /v1/completions."""

    prompt: Annotated[str | list[Annotated[int, Field(strict=True)]], Field(min_length=1)]

    @property
    def num_prompt_tokens(self) -> int:
        """See `Question`."""
        return len(self.prompt.split() if isinstance(self.prompt, str) else self.prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatQuestion(Question):
    """Of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]

    @property
    def num_prompt_tokens(self) -> int:
        """See `Question`."""
        return sum(len(str(message.get("content", "")).split()) for message in self.messages)


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer. Token t of every answer has the id 100 + t."""

    question: Question
    answer: Answer
    number: int
    created: int

    def opening(self) -> bytes:
        """What comes before the first text; may be nothing."""
        if self.question.is_chat:
            return self._event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        return b""

    def chunk(self, place: int) -> bytes:
        """The event with chunk `place` of the answer."""
        begin, end = self.answer.num_tokens(place), self.answer.num_tokens(place + 1)
        return self._event([self._choice("delta", begin, end, is_last=place + 1 == self.answer.num_chunks)])

    def ending(self, received_s: float, written_s: Sequence[float]) -> bytes:
        """The usage, where it was asked for, and the end of the stream."""
        if not (self.question.stream_options or {}).get("include_usage") or self.answer.has(FaultKind.NO_USAGE):
            return DONE
        return self._event([], {"usage": self._usage(received_s, written_s)}) + DONE

    def whole(self, received_s: float, written_s: Sequence[float]) -> dict[str, Any]:
        """The answer that is not a stream."""
        choice = self._choice("message", 0, self._num_tokens, is_last=True)
        if self.question.is_chat:
            choice["message"]["role"] = "assistant"
        kind = "chat.completion" if self.question.is_chat else "text_completion"
        return {**self._head(kind), "choices": [choice], "usage": self._usage(received_s, written_s)}

    @property
    def _num_tokens(self) -> int:
        return self.answer.num_tokens(self.answer.num_chunks)

    def _choice(self, chat_member: str, begin: int, end: int, *, is_last: bool) -> dict[str, Any]:
        text = self.answer.text(begin, end)
        finish = "length" if self._num_tokens >= self.question.num_output_tokens else "stop"
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish if is_last else None}
        choice |= {chat_member: {"content": text}} if self.question.is_chat else {"text": text}
        if self.question.return_token_ids:
            choice["token_ids"] = list(range(_FIRST_TOKEN_ID + begin, _FIRST_TOKEN_ID + end))
        return choice

    def _event(self, choices: list[dict[str, Any]], members: dict[str, Any] | None = None) -> bytes:
        kind = "chat.completion.chunk" if self.question.is_chat else "text_completion"
        return sse_event({**self._head(kind), "choices": choices, **(members or {})})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"mock-{self.number}", "object": kind, "created": self.created, "model": self.question.model}

    def _usage(self, received_s: float, written_s: Sequence[float]) -> dict[str, Any]:
        num_prompt = self.question.num_prompt_tokens + self.answer.has(FaultKind.WRONG_PROMPT_USAGE)
        num_output = 0 if self.answer.has(FaultKind.NO_CHOICES) else self._num_tokens
        num_output += self.answer.has(FaultKind.WRONG_COMPLETION_USAGE)
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        if self.question.return_timings and written_s:
            usage |= _baton_members(received_s, written_s)
        return usage


def sse_event(payload: dict[str, Any]) -> bytes:
    """`payload` as one server-sent event."""
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


def _baton_members(received_s: float, written_s: Sequence[float]) -> dict[str, Any]:
    """`kv_transfer` and `timings` of an answer whose first two chunks are its first two tokens."""
    first_s = written_s[0]
    timings: dict[str, Any] = {"clock": host_clock(), "attempts": 1, **dict.fromkeys(_TO_SECOND)}
    timings |= {name: _between_us(received_s, first_s, share) for name, share in _TO_FIRST.items()}
    if len(written_s) < 2:
        return {"timings": timings}
    timings |= {name: _between_us(first_s, written_s[1], share) for name, share in _TO_SECOND.items()}
    transfer_ms = (timings["kv_ready_us"] - timings["first_sampled_us"]) / 1e3
    transfer = {"blocks": 1, "bytes": _KV_BYTES, "transfer_ms": transfer_ms, "exposed_ms": transfer_ms}
    return {"kv_transfer": transfer, "timings": timings}


def _between_us(begin_s: float, end_s: float, share: float) -> int:
    return round((begin_s + (end_s - begin_s) * share) * 1e6)
