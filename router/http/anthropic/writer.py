"""Answers of /v1/messages: the message, and the events of its stream.

Owns these formats. Does not know requests in flight, nodes or sockets. A thinking block has a signature because clients
want one; nobody checks it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from baton.engine.text.choice_text import TextDelta
from baton.router.http.anthropic.errors import messages_error
from baton.router.http.anthropic.request import MessagesRequest
from baton.router.http.openai.answer_blocks import CALL, REASONING, TEXT, AnswerBlocks, Block, BlockEvent, Change
from baton.router.http.openai.answer_parts import FINISH_CALLS
from baton.router.http.openai.errors import error_body, status_of
from baton.router.http.openai.replies import NO_REPORT, PromptReport, ReplyHead, named_event
from baton.router.http.openai.usage import TokensSoFar, Usage
from baton.wire.messages.output import FINISH_LENGTH

_SIGNATURE = "unsigned"
_FIELDS = ("thinking of this type or display", "thinking.budget_tokens")
"""What leaves reasoning out, and what bounds it."""
_INVALID = "INVALID_JSON"
"""The member under which arguments that are no JSON object stand, as Anthropic suggests for sending them back."""
_DELTA: Mapping[str, tuple[str, str]] = {
    TEXT: ("text_delta", "text"),
    REASONING: ("thinking_delta", "thinking"),
    CALL: ("input_json_delta", "partial_json"),
}
_STOP_REASONS = {FINISH_LENGTH: "max_tokens", FINISH_CALLS: "tool_use"}


class MessageWriter:
    """`AnswerWriter` of /v1/messages."""

    end: ClassVar[bytes] = named_event("message_stop")

    def __init__(self, head: ReplyHead, request: MessagesRequest, blocks: AnswerBlocks) -> None:
        self._head = head
        self._blocks = blocks
        self._id = f"msg_{head.id_of('message')[:24]}"

    async def whole(self, piece: TextDelta, usage: Usage) -> dict[str, Any]:
        """The answer, of which `piece` is all text."""
        await asyncio.to_thread(self._blocks.push_whole, piece)
        content = [_whole_block(block) for block in self._blocks.blocks]
        message = self._message(content, self._usage(usage), self._blocks.warnings(*_FIELDS))
        return {**message, **self._stop()}

    def begin(
        self,
        index: int,
        prompt_ids: Sequence[int] = (),
        so_far: TokensSoFar | None = None,
        prompt: PromptReport = NO_REPORT,
    ) -> bytes:
        """The events before the first block. How many tokens were cached is known at the end."""
        num_prompt_tokens = 0 if so_far is None else so_far.num_prompt_tokens
        return named_event("message_start", message=self._message([], _tokens(num_prompt_tokens))) + named_event("ping")

    def chunk(self, index: int, delta: TextDelta, so_far: TokensSoFar | None = None) -> bytes:
        """What the next text does to the blocks."""
        return b"".join(map(_render, self._blocks.push(delta)))

    async def usage(self, usage: Usage) -> bytes:
        """The event that says why the answer ended."""
        warnings = self._blocks.warnings(*_FIELDS)
        members = {"warnings": warnings} if warnings else {}
        return named_event("message_delta", delta=self._stop(), usage=self._usage(usage), **members)

    def error(self, error: Exception, num_told: int) -> bytes:
        """The event that ends an answer which failed after its first text."""
        body = messages_error(status_of(error), error_body(error))
        return named_event("error", error=body["error"])

    def _message(
        self, content: list[dict[str, Any]], usage: dict[str, Any], warnings: Sequence[str] = ()
    ) -> dict[str, Any]:
        message = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        told = (*self._head.warnings, *warnings)
        return {**message, "warnings": told} if told else message

    def _stop(self) -> dict[str, Any]:
        sequence = self._blocks.stop_string
        reason = _STOP_REASONS.get(
            self._blocks.finish_reason or "", "end_turn" if sequence is None else "stop_sequence"
        )
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self, usage: Usage) -> dict[str, Any]:
        details = {"thinking_tokens": self._blocks.num_reasoning_tokens}
        counts = _tokens(usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_completion_tokens)
        return {**counts, "output_tokens_details": details}


def _tokens(num_prompt_tokens: int, num_cached: int = 0, num_output: int = 0) -> dict[str, Any]:
    """Counts of tokens; those that were cached are told apart from the other input."""
    return {
        "input_tokens": num_prompt_tokens - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
    }


def _render(event: BlockEvent) -> bytes:
    block = event.block
    match event.change:
        case Change.BEGUN:
            return named_event("content_block_start", index=block.place, content_block=_begun_block(block))
        case Change.GREW:
            kind, name = _DELTA[block.kind]
            return named_event("content_block_delta", index=block.place, delta={"type": kind, name: event.text})
        case Change.ENDED:
            stop = named_event("content_block_stop", index=block.place)
            if block.kind != REASONING:
                return stop
            signature = {"type": "signature_delta", "signature": _SIGNATURE}
            return named_event("content_block_delta", index=block.place, delta=signature) + stop


def _begun_block(block: Block) -> dict[str, Any]:
    if block.kind == TEXT:
        return {"type": "text", "text": ""}
    if block.kind == REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _whole_block(block: Block) -> dict[str, Any]:
    begun = _begun_block(block)
    if block.kind == TEXT:
        return {**begun, "text": block.text}
    if block.kind == REASONING:
        return {**begun, "thinking": block.text, "signature": _SIGNATURE}
    return {**begun, "input": _arguments(block.text)}


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {_INVALID: text}
