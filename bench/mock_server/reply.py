"""The bytes of the mock server's answers, in OpenAI's format. Knows no time but what it is told, and no socket.

Baton's own members of `usage` are made up here: shares of the times at which chunks were really written, so that they
fit to what the client sees.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.mock_server.question import Question
from bench.mock_server.schedule import Answer, FaultKind
from program.clock import host_clock

DONE = b"data: [DONE]\n\n"
_FIRST_TOKEN_ID = 100
_KV_BYTES = 2**20
# shares of the time to the first token, then of the gap to the second
_TO_FIRST = {"received_us": 0.0, "sent_us": 0.02, "prefill_begun_us": 0.20, "first_sampled_us": 0.95}
_TO_SECOND = {"kv_ready_us": 0.30, "decode_begun_us": 0.40, "second_sampled_us": 0.90}


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
        text = self.answer.text(begin, end)
        finish = self._finish_reason() if place + 1 == self.answer.num_chunks else None
        choice: dict[str, Any] = {
            "index": 0,
            **({"delta": {"content": text}} if self.question.is_chat else {"text": text}),
        }
        choice |= {"logprobs": None, "finish_reason": finish}
        if self.question.with_token_ids:
            choice["token_ids"] = _token_ids(begin, end)
        return self._event([choice])

    def ending(self, received_s: float, written_s: Sequence[float]) -> bytes:
        """The usage, where it was asked for, and the end of the stream."""
        if not self.question.with_usage or self.answer.has(FaultKind.NO_USAGE):
            return DONE
        return self._event([], {"usage": self._usage(received_s, written_s)}) + DONE

    def whole(self, received_s: float, written_s: Sequence[float]) -> dict[str, Any]:
        """The answer that is not a stream."""
        num_tokens = self.answer.num_tokens(self.answer.num_chunks)
        text = self.answer.text(0, num_tokens)
        content = {"message": {"role": "assistant", "content": text}} if self.question.is_chat else {"text": text}
        choice: dict[str, Any] = {"index": 0, **content, "logprobs": None, "finish_reason": self._finish_reason()}
        if self.question.with_token_ids:
            choice["token_ids"] = _token_ids(0, num_tokens)
        kind = "chat.completion" if self.question.is_chat else "text_completion"
        return {**self._head(kind), "choices": [choice], "usage": self._usage(received_s, written_s)}

    def _event(self, choices: list[dict[str, Any]], members: dict[str, Any] | None = None) -> bytes:
        kind = "chat.completion.chunk" if self.question.is_chat else "text_completion"
        return sse_event({**self._head(kind), "choices": choices, **(members or {})})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"mock-{self.number}", "object": kind, "created": self.created, "model": self.question.model}

    def _finish_reason(self) -> str:
        num_tokens = self.answer.num_tokens(self.answer.num_chunks)
        return "length" if num_tokens >= self.question.num_output_tokens else "stop"

    def _usage(self, received_s: float, written_s: Sequence[float]) -> dict[str, Any]:
        num_prompt = self.question.num_prompt_tokens + self.answer.has(FaultKind.WRONG_PROMPT_USAGE)
        is_empty = self.answer.has(FaultKind.NO_CHOICES)
        num_output = 0 if is_empty else self.answer.num_tokens(self.answer.num_chunks)
        num_output += self.answer.has(FaultKind.WRONG_COMPLETION_USAGE)
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        if self.question.with_timings and written_s:
            usage |= _baton_members(received_s, written_s)
        return usage


def sse_event(payload: dict[str, Any]) -> bytes:
    """`payload` as one server-sent event."""
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


def _token_ids(begin: int, end: int) -> list[int]:
    return list(range(_FIRST_TOKEN_ID + begin, _FIRST_TOKEN_ID + end))


def _baton_members(received_s: float, written_s: Sequence[float]) -> dict[str, Any]:
    """`kv_transfer` and `timings` of an answer whose first two chunks are its first two tokens."""
    first_s = written_s[0]
    timings: dict[str, Any] = {"clock": host_clock(), "attempts": 1}
    timings |= {name: _between_us(received_s, first_s, share) for name, share in _TO_FIRST.items()}
    timings |= dict.fromkeys((*_TO_SECOND, "second_written_us"))
    timings["first_written_us"] = _between_us(received_s, first_s, 1.0)
    if len(written_s) < 2:
        return {"timings": timings}
    timings |= {name: _between_us(first_s, written_s[1], share) for name, share in _TO_SECOND.items()}
    timings["second_written_us"] = _between_us(first_s, written_s[1], 1.0)
    transfer_ms = (timings["kv_ready_us"] - timings["first_sampled_us"]) / 1e3
    transfer = {"blocks": 1, "bytes": _KV_BYTES, "transfer_ms": transfer_ms, "exposed_ms": transfer_ms}
    return {"kv_transfer": transfer, "timings": timings}


def _between_us(begin_s: float, end_s: float, share: float) -> int:
    return round((begin_s + (end_s - begin_s) * share) * 1e6)
