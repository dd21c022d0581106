"""Answers of /v1/responses: the response object, and the events of its stream.

Owns these formats. Does not know requests in flight, nodes or sockets. Each block of an answer is one item of its
output. Events are numbered from 0, the last one carries the whole answer, and no `[DONE]` follows. An answer that
reached its limit of tokens is `incomplete`, every other one that ended well is `completed`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias

from baton.engine.text.choice_text import TextDelta, TokenEntry
from baton.router.http.openai.answer_blocks import CALL, REASONING, TEXT, AnswerBlocks, Block, BlockEvent, Change
from baton.router.http.openai.errors import error_body
from baton.router.http.openai.logprob_formats import chat_logprobs
from baton.router.http.openai.replies import NO_REPORT, PromptReport, ReplyHead, named_event
from baton.router.http.openai.responses_request import ResponsesRequest
from baton.router.http.openai.responses_tools import shown_choice, shown_tools
from baton.router.http.openai.usage import TokensSoFar, Usage, usage_object
from baton.wire.messages.output import FINISH_LENGTH

COMPLETED, INCOMPLETE, IN_PROGRESS, FAILED = "completed", "incomplete", "in_progress", "failed"
_ITEM_PREFIX: Mapping[str, str] = {TEXT: "msg", REASONING: "rs", CALL: "fc"}
_DELTA: Mapping[str, str] = {
    TEXT: "response.output_text.delta",
    REASONING: "response.reasoning_text.delta",
    CALL: "response.function_call_arguments.delta",
}
StoreResponse: TypeAlias = Callable[[dict[str, Any], ReplyHead], Awaitable[str]]
"""Stores a response that has ended; why it is not stored, "" when it is."""


def response_id_of(reply_id: str) -> str:
    """The id of the response, by that of its stream."""
    return reply_id.replace("-", "_", 1)


def reply_id_of(response_id: str) -> str:
    """The id of the stream that a response came in."""
    return response_id.replace("_", "-", 1)


class ResponseWriter:
    """`AnswerWriter` of /v1/responses."""

    end: ClassVar[bytes] = b""

    def __init__(
        self, head: ReplyHead, request: ResponsesRequest, blocks: AnswerBlocks, store: StoreResponse | None = None
    ) -> None:
        """`store`: None when the response is not to be stored."""
        self._head = head
        self._blocks = blocks
        self._store = store
        self._settings = {**_echoed(request), "store": store is not None}
        self._response_id = response_id_of(head.reply_id)
        self._number = 0

    async def whole(self, piece: TextDelta, usage: Usage) -> dict[str, Any]:
        """The answer, of which `piece` is all text. It is stored before it is told."""

        def end() -> dict[str, Any]:
            self._blocks.push_whole(piece)
            return self._ended(usage)

        return await self._stored(await asyncio.to_thread(end))

    def begin(
        self,
        index: int,
        prompt_ids: Sequence[int] = (),
        so_far: TokensSoFar | None = None,
        prompt: PromptReport = NO_REPORT,
    ) -> bytes:
        """The events before the first block."""
        begun = self._object(IN_PROGRESS, [])
        return b"".join(self._event(f"response.{name}", response=begun) for name in ("created", IN_PROGRESS))

    def chunk(self, index: int, delta: TextDelta, so_far: TokensSoFar | None = None) -> bytes:
        """What the next text does to the blocks."""
        return b"".join(self._render(event) for event in self._blocks.push(delta))

    async def usage(self, usage: Usage) -> bytes:
        """The event after the last block: the whole answer. It is stored before it is told."""
        ended = await self._stored(self._ended(usage))
        return self._event(f"response.{ended['status']}", response=ended)

    def error(self, error: Exception, num_told: int) -> bytes:
        """The event that ends an answer which failed after its first text. Its number follows that of the last event
        that was told: those that were made and not sent are gone."""
        self._number = num_told
        message = error_body(error)["error"]["message"]
        failed = self._object(FAILED, [], error={"code": "server_error", "message": message})
        return self._event("response.failed", response=failed)

    def _render(self, event: BlockEvent) -> bytes:
        block = event.block
        place = {"item_id": self._id_of(block), "output_index": block.place}
        match event.change:
            case Change.BEGUN:
                empty = replace(block, pieces=[], entries=[])
                item = self._item(empty, IN_PROGRESS)
                added = self._event("response.output_item.added", output_index=block.place, item=item)
                if block.kind == CALL:
                    return added
                return added + self._event("response.content_part.added", **place, content_index=0, part=_part(empty))
            case Change.GREW:
                return self._event(_DELTA[block.kind], **place, **_delta_members(event))
            case Change.ENDED:
                return self._done(block, place)

    def _done(self, block: Block, place: dict[str, Any]) -> bytes:
        item = self._item(block, self._item_status(block))
        if block.kind == CALL:
            told: dict[str, Any] = {"name": block.name, "arguments": block.text}
            events = [self._event("response.function_call_arguments.done", **place, **told)]
        else:
            part = _part(block)
            told = {name: member for name, member in part.items() if name in ("text", "logprobs")}
            kind = "output_text" if block.kind == TEXT else "reasoning_text"
            events = [
                self._event(f"response.{kind}.done", **place, content_index=0, **told),
                self._event("response.content_part.done", **place, content_index=0, part=part),
            ]
        events.append(self._event("response.output_item.done", output_index=block.place, item=item))
        return b"".join(events)

    async def _stored(self, ended: dict[str, Any]) -> dict[str, Any]:
        reason = "" if self._store is None else await self._store(ended, self._head)
        if not reason:
            return ended
        return {**ended, "store": False, "warnings": (*self._head.warnings, f"the response is not stored: {reason}")}

    def _ended(self, usage: Usage) -> dict[str, Any]:
        status = INCOMPLETE if self._blocks.finish_reason == FINISH_LENGTH else COMPLETED
        details = {"reason": "max_output_tokens"} if status == INCOMPLETE else None
        told = responses_usage(usage, self._blocks.num_reasoning_tokens)
        members: dict[str, Any] = {"incomplete_details": details, "usage": told}
        if status == COMPLETED:
            members["completed_at"] = max(usage.ended_at, self._head.created)
        if self._head.warnings:
            members["warnings"] = self._head.warnings
        items = [self._item(block, self._item_status(block)) for block in self._blocks.blocks]
        return self._object(status, items, **members)

    def _item_status(self, block: Block) -> str:
        """Only the last item of an answer may lack its end."""
        is_last = block is self._blocks.blocks[-1]
        return INCOMPLETE if is_last and self._blocks.finish_reason == FINISH_LENGTH else COMPLETED

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """One item of the output; without its content when it has just begun."""
        item: dict[str, Any] = {"id": self._id_of(block), "status": status}
        content = [] if status == IN_PROGRESS else [_part(block)]
        if block.kind == TEXT:
            return item | {"type": "message", "role": "assistant", "content": content}
        if block.kind == REASONING:
            return item | {"type": "reasoning", "summary": [], "content": content}
        return item | {
            "type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": block.text,
        }  # fmt: skip

    def _id_of(self, block: Block) -> str:
        return f"{_ITEM_PREFIX[block.kind]}_{self._head.id_of(f'item {block.place}')}"

    def _object(self, status: str, output: Sequence[dict[str, Any]], **members: Any) -> dict[str, Any]:
        return {
            "id": self._response_id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._head.model,
            "output": output,
            "usage": None,
            **self._settings,
            **members,
        }

    def _event(self, kind: str, **members: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event(kind, sequence_number=number, **members)


def responses_usage(usage: Usage, num_reasoning_tokens: int) -> dict[str, Any]:
    """The usage under the names of this endpoint; Baton's own members keep theirs."""
    members = usage_object(usage)
    return {
        "input_tokens": members.pop("prompt_tokens"),
        "input_tokens_details": {**members.pop("prompt_tokens_details"), "cache_write_tokens": 0},
        "output_tokens": members.pop("completion_tokens"),
        "output_tokens_details": {
            "reasoning_tokens": num_reasoning_tokens,
            **members.pop("completion_tokens_details", {}),
        },
        **members,
    }


def _part(block: Block) -> dict[str, Any]:
    """The content of a message or of reasoning."""
    if block.kind == REASONING:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": _logprobs(block.entries)}


def _delta_members(event: BlockEvent) -> dict[str, Any]:
    if event.block.kind == CALL:
        return {"delta": event.text}
    members = {"content_index": 0, "delta": event.text}
    return members if event.block.kind == REASONING else {**members, "logprobs": _logprobs(event.entries)}


def _logprobs(entries: Sequence[TokenEntry]) -> list[dict[str, Any]]:
    found = chat_logprobs(entries)
    return [] if found is None else found["content"]


def _echoed(request: ResponsesRequest) -> dict[str, Any]:
    """The settings of the request, which every state of the answer repeats."""
    return {
        "background": False,
        "conversation": None if request.conversation is None else {"id": request.conversation},
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": dict(request.metadata or {}),
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": None if request.reasoning is None else request.reasoning.effort, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "temperature": request.temperature,
        "text": {"format": dict(request.text_format)},
        "tool_choice": shown_choice(request.tool_choice),
        "tools": shown_tools(request.tools),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": request.truncation,
        "user": request.user,
    }
