"""Answers of /v1/responses: the response object, and the events of its stream.

Owns these formats. Does not know requests in flight, nodes or sockets. An answer holds one message with one text part;
its events are numbered from 0, the last one carries the whole answer, and no `[DONE]` follows. An answer that reached
its limit of tokens is `incomplete`, every other one that ended well is `completed`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from engine.text.choice_text import TextDelta, join_deltas
from router.openai.errors import error_body
from router.openai.logprob_formats import chat_logprobs
from router.openai.responses import NO_REPORT, PromptReport, ReplyHead, TokensSoFar, Usage, json_bytes, usage_object
from router.openai.responses_request import ResponsesRequest
from wire.messages import FINISH_LENGTH

COMPLETED, INCOMPLETE, IN_PROGRESS, FAILED = "completed", "incomplete", "in_progress", "failed"
_PLACE: Mapping[str, int] = {"output_index": 0, "content_index": 0}


class ResponseObject:
    """Renders one answer at any moment of its life."""

    def __init__(self, head: ReplyHead, request: ResponsesRequest) -> None:
        self.message_id = f"msg_{head.id_of('message')}"
        self._settings = _echoed(request)
        self._response_id = f"resp_{head.id_of('response')}"
        self._created = head.created
        self._model = head.model
        self._warnings = head.warnings

    def begun(self) -> dict[str, Any]:
        """The answer before its first text."""
        return self._object(IN_PROGRESS, [])

    def ended(self, whole: TextDelta, usage: Usage) -> dict[str, Any]:
        """The answer with all its text."""
        status = status_of(whole)
        details = {"reason": "max_output_tokens"} if status == INCOMPLETE else None
        members: dict[str, Any] = {"incomplete_details": details, "usage": responses_usage(usage)}
        if status == COMPLETED:
            members["completed_at"] = int(time.time())
        if self._warnings:
            members["warnings"] = self._warnings
        return self._object(status, [self.message(status, whole)], **members)

    def failed(self, error: Exception) -> dict[str, Any]:
        """The answer that ended with `error`."""
        message = error_body(error)["error"]["message"]
        return self._object(FAILED, [], error={"code": "server_error", "message": message})

    def message(self, status: str, whole: TextDelta | None = None) -> dict[str, Any]:
        """The output item; without its content before the first text."""
        content = [] if whole is None else [text_part(whole)]
        return {"id": self.message_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _object(self, status: str, output: Sequence[dict[str, Any]], **members: Any) -> dict[str, Any]:
        return {
            "id": self._response_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": output,
            "usage": None,
            **self._settings,
            **members,
        }


class ResponseStream:
    """`ReplyStream` of /v1/responses."""

    end: ClassVar[bytes] = b""

    def __init__(self, response: ResponseObject) -> None:
        self._response = response
        self._number = 0
        self._deltas: list[TextDelta] = []
        self._item = {"item_id": response.message_id, **_PLACE}

    def begin(
        self,
        index: int,
        prompt_ids: Sequence[int] = (),
        so_far: TokensSoFar | None = None,
        prompt: PromptReport = NO_REPORT,
    ) -> bytes:
        """The events before the first text."""
        begun = self._response.begun()
        return b"".join((
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event("response.output_item.added", output_index=0, item=self._response.message(IN_PROGRESS)),
            self._event("response.content_part.added", **self._item, part=text_part(TextDelta(""))),
        ))  # fmt: skip

    def chunk(self, index: int, delta: TextDelta, so_far: TokensSoFar | None = None) -> bytes:
        """The next text. Nothing for a piece without any, but for its tokens in the whole answer."""
        self._deltas.append(delta)
        logprobs = _logprobs(delta)
        if not delta.text and not logprobs:
            return b""
        return self._event("response.output_text.delta", **self._item, delta=delta.text, logprobs=logprobs)

    def usage(self, usage: Usage) -> bytes:
        """The events after the last text: first the ends of the part, the message and the text, then the answer."""
        whole = join_deltas(self._deltas)
        part, status = text_part(whole), status_of(whole)
        ended = self._response.ended(whole, usage)
        return b"".join((
            self._event("response.output_text.done", **self._item, text=whole.text, logprobs=part["logprobs"]),
            self._event("response.content_part.done", **self._item, part=part),
            self._event("response.output_item.done", output_index=0, item=ended["output"][0]),
            self._event(f"response.{status}", response=ended),
        ))  # fmt: skip

    def error(self, error: Exception) -> bytes:
        """The event that ends an answer which failed after its first text."""
        return self._event("response.failed", response=self._response.failed(error))

    def _event(self, kind: str, **members: Any) -> bytes:
        payload = json_bytes({"type": kind, "sequence_number": self._number, **members})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), payload)


def text_part(whole: TextDelta) -> dict[str, Any]:
    """The content of a message."""
    return {"type": "output_text", "text": whole.text, "annotations": [], "logprobs": _logprobs(whole)}


def responses_usage(usage: Usage) -> dict[str, Any]:
    """The usage under the names of this endpoint; Baton's own members keep theirs."""
    members = usage_object(usage)
    return {
        "input_tokens": members.pop("prompt_tokens"),
        "input_tokens_details": members.pop("prompt_tokens_details"),
        "output_tokens": members.pop("completion_tokens"),
        "output_tokens_details": {"reasoning_tokens": 0},
        **members,
    }


def status_of(whole: TextDelta) -> str:
    """How an answer that did not fail has ended."""
    return INCOMPLETE if whole.finish_reason == FINISH_LENGTH else COMPLETED


def _logprobs(delta: TextDelta) -> list[dict[str, Any]]:
    found = chat_logprobs(delta.entries)
    return [] if found is None else found["content"]


def _echoed(request: ResponsesRequest) -> dict[str, Any]:
    """The settings of the request, which every state of the answer repeats."""
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": dict(request.metadata or {}),
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": request.temperature,
        "text": {"format": dict(request.text_format)},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": request.truncation,
        "user": request.user,
    }
