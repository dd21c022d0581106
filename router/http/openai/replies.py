"""Answers as bytes: whole answers, chunks of a stream, server-sent events.

Owns the formats of the OpenAI interface. Does not know requests, nodes or sockets; everything here is a pure function
of its arguments. A stream builder renders what all its chunks share once, so that one chunk costs a few string joins.

Invariant of every event: one line, whatever the text holds. JSON escapes line feeds; the other characters at which some
clients split lines (U+0085, U+2028, U+2029) are escaped here. Log probabilities are finite: -inf is written as -9999,
as OpenAI does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from json.encoder import encode_basestring
from typing import Any, ClassVar, Protocol

from baton.engine.text.choice_text import TextDelta
from baton.router.http.openai.errors import error_body
from baton.router.http.openai.logprob_formats import (
    chat_logprobs,
    completion_logprobs,
    prompt_and_output,
    whole_logprobs,
)
from baton.router.http.openai.usage import TokensSoFar, Usage, token_counts, usage_object
from baton.router.http.serving.json_pieces import dumps, json_pieces

SSE_DONE = b"data: [DONE]\n\n"

_NO_MEMBERS = ',"logprobs":null,"finish_reason":null'


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """The members that all parts of one answer share. `created` is in seconds since 1970.

    `warnings`: what is said once, in a member of a whole answer or of a stream's first event.
    """

    reply_id: str
    created: int
    model: str
    warnings: tuple[str, ...] = ()

    def id_of(self, part: str) -> str:
        """128 bits in hex, the same whenever this answer is rendered: its stream may be resumed at another router."""
        return blake2b(f"{self.reply_id} {part}".encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class PromptReport:
    """The prompt of one choice as its answer shows it. `text`: "" unless echoed. `logprobs`: the lists of
    `completion_logprobs` for the prompt's tokens; `listed`: vLLM's `prompt_logprobs`; None unless wanted."""

    text: str = ""
    logprobs: dict[str, list[Any]] | None = None
    listed: list[dict[str, Any] | None] | None = None


NO_REPORT = PromptReport()


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """One finished choice. `prompt_ids` is None unless the request asked for token ids. `message`: members of a chat's
    message whose answer was told apart."""

    index: int
    whole: TextDelta
    prompt_ids: Sequence[int] | None = None
    prompt: PromptReport = NO_REPORT
    message: Mapping[str, Any] = field(default_factory=dict)


class ReplyStream(Protocol):
    """Renders one streamed answer of any endpoint, event by event. `so_far`: what the event's own `usage` says, for a
    client that wants one in every event."""

    end: ClassVar[bytes]
    """What follows the last event of an answer that ended well."""

    def begin(
        self,
        index: int,
        prompt_ids: Sequence[int] = (),
        so_far: TokensSoFar | None = None,
        prompt: PromptReport = NO_REPORT,
    ) -> bytes:
        """The event before the first text of choice `index`, with what is told of the prompt; may be empty."""
        ...

    def chunk(self, index: int, delta: TextDelta, so_far: TokensSoFar | None = None) -> bytes:
        """The next piece of choice `index`. The last one carries the finish reason."""
        ...

    async def usage(self, usage: Usage) -> bytes:
        """The event with the usage and no choices, which is the last before `end`."""
        ...

    def error(self, error: Exception, num_told: int) -> bytes:
        """The event that ends an answer which failed after its headers were sent: the client was told `num_told` events
        before, which may be fewer than were made. `end` may not follow it."""
        ...


class _StreamFrame:
    """The beginning and end of every event with one choice, which are constant unless an event has a usage."""

    def __init__(self, head: ReplyHead, kind: str, include_usage: bool) -> None:
        self._head = head
        self._kind = kind
        self._warnings = head.warnings
        opening = one_line(dumps(_head_members(head, kind)))[:-1]
        self._prefix = f'data: {opening},"choices":[{{"index":'
        self._suffix = '}],"usage":null}\n\n' if include_usage else "}]}\n\n"
        self._plain_suffix = _NO_MEMBERS + self._suffix

    def plain_event(self, index: int, rendered: str, so_far: TokensSoFar | None) -> bytes:
        """An event in the middle of a choice that carries text and nothing else."""
        suffix = self._plain_suffix if so_far is None else _NO_MEMBERS + _usage_suffix(so_far)
        return f"{self._prefix}{index},{rendered}{suffix}".encode()

    def event(self, index: int, rendered: str, members: dict[str, Any], so_far: TokensSoFar | None) -> bytes:
        """An event with `members` beside the text."""
        suffix = self._suffix if so_far is None else _usage_suffix(so_far)
        return f"{self._prefix}{index},{rendered},{one_line(dumps(members))[1:-1]}{suffix}".encode()

    def usage(self, usage: Usage) -> bytes:
        return sse_event({**_head_members(self._head, self._kind), "choices": [], "usage": usage_object(usage)})

    def warn(self, warnings: tuple[str, ...]) -> None:
        """Have the next event with warnings carry these too."""
        self._warnings += warnings

    @property
    def has_warnings(self) -> bool:
        """Whether there are warnings that no event has carried."""
        return bool(self._warnings)

    def with_warnings(self, event: bytes) -> bytes:
        """`event`, and in it the warnings that no event has carried."""
        if not self._warnings:
            return event
        warnings, self._warnings = self._warnings, ()
        return f'{event.decode()[:-3]},"warnings":{dumps(warnings)}}}\n\n'.encode()


class _ChunkStream:
    """How streams of chunks end."""

    end: ClassVar[bytes] = SSE_DONE

    def error(self, error: Exception, num_told: int) -> bytes:
        return sse_error(error)


class ChatStream(_ChunkStream):
    """`ReplyStream` of /v1/chat/completions."""

    def __init__(self, head: ReplyHead, include_usage: bool = False, with_token_ids: bool = False) -> None:
        self._frame = _StreamFrame(head, "chat.completion.chunk", include_usage)
        self._with_token_ids = with_token_ids

    def begin(
        self,
        index: int,
        prompt_ids: Sequence[int] = (),
        so_far: TokensSoFar | None = None,
        prompt: PromptReport = NO_REPORT,
    ) -> bytes:
        rendered = '"delta":{"role":"assistant","content":""}'
        if not self._with_token_ids:
            return self._frame.with_warnings(self._frame.plain_event(index, rendered, so_far))
        members = {"logprobs": None, "finish_reason": None, "prompt_token_ids": list(prompt_ids)}
        return self._frame.with_warnings(self._frame.event(index, rendered, members, so_far))

    def chunk(self, index: int, delta: TextDelta, so_far: TokensSoFar | None = None) -> bytes:
        rendered = f'"delta":{{"content":{_quoted(delta.text)}}}' if delta.text else '"delta":{}'
        if is_plain(delta, self._with_token_ids):
            return self._frame.plain_event(index, rendered, so_far)
        members = {"logprobs": chat_logprobs(delta.entries), "finish_reason": delta.finish_reason}
        return self._frame.event(index, rendered, members | token_id_members(delta, self._with_token_ids), so_far)

    async def usage(self, usage: Usage) -> bytes:
        return self._frame.usage(usage)


class CompletionStream(_ChunkStream):
    """`ReplyStream` of /v1/completions."""

    def __init__(self, head: ReplyHead, include_usage: bool = False, with_token_ids: bool = False) -> None:
        self._frame = _StreamFrame(head, "text_completion", include_usage)
        self._with_token_ids = with_token_ids

    def begin(
        self,
        index: int,
        prompt_ids: Sequence[int] = (),
        so_far: TokensSoFar | None = None,
        prompt: PromptReport = NO_REPORT,
    ) -> bytes:
        if not self._with_token_ids and not self._frame.has_warnings and prompt is NO_REPORT:
            return b""
        members: dict[str, Any] = {"logprobs": prompt.logprobs, "finish_reason": None}
        if self._with_token_ids:
            members["prompt_token_ids"] = list(prompt_ids)
        return self._frame.with_warnings(self._frame.event(index, f'"text":{_quoted(prompt.text)}', members, so_far))

    def chunk(self, index: int, delta: TextDelta, so_far: TokensSoFar | None = None) -> bytes:
        rendered = f'"text":{_quoted(delta.text)}'
        if is_plain(delta, self._with_token_ids):
            return self._frame.plain_event(index, rendered, so_far)
        members = {"logprobs": completion_logprobs(delta.entries), "finish_reason": delta.finish_reason}
        return self._frame.event(index, rendered, members | token_id_members(delta, self._with_token_ids), so_far)

    async def usage(self, usage: Usage) -> bytes:
        return self._frame.usage(usage)


def chat_completion(head: ReplyHead, choices: Sequence[FinishedChoice], usage: Usage) -> dict[str, Any]:
    """The answer of /v1/chat/completions when it is not streamed, for `json_pieces`."""
    rendered = [
        {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.whole.text, "refusal": None, **choice.message},
            "logprobs": whole_logprobs(chat_logprobs, choice.whole.entries),
            "finish_reason": choice.whole.finish_reason,
            **_all_token_ids(choice),
        }
        for choice in choices
    ]
    return {**_whole_answer(head, "chat.completion", rendered, usage), **prompt_logprobs(choices[0])}


def text_completion(head: ReplyHead, choices: Iterable[FinishedChoice], usage: Usage) -> dict[str, Any]:
    """The answer of /v1/completions when it is not streamed, for `json_pieces`. Choice `c` of prompt `p` has index
    p * n + c."""
    rendered = [
        {
            "index": choice.index,
            "text": choice.prompt.text + choice.whole.text,
            "logprobs": prompt_and_output(
                choice.prompt.logprobs, whole_logprobs(completion_logprobs, choice.whole.entries)
            ),
            "finish_reason": choice.whole.finish_reason,
            **_all_token_ids(choice),
            **prompt_logprobs(choice),
        }
        for choice in choices
    ]
    return _whole_answer(head, "text_completion", rendered, usage)


def _whole_answer(head: ReplyHead, kind: str, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
    answer = {**_head_members(head, kind), "choices": choices, "usage": usage_object(usage)}
    return {**answer, "warnings": head.warnings} if head.warnings else answer


def prompt_logprobs(choice: FinishedChoice) -> dict[str, Any]:
    """The member `prompt_logprobs`, where vLLM has it: in a choice of completions, beside the choices of a chat."""
    return {} if choice.prompt.listed is None else {"prompt_logprobs": choice.prompt.listed}


def sse_event(payload: dict[str, Any]) -> bytes:
    """`payload` as one server-sent event."""
    return f"data: {one_line(dumps(payload))}\n\n".encode("utf-8", "replace")


def named_event(kind: str, **members: Any) -> bytes:
    """A server-sent event with a name, which is the `type` of its payload too."""
    return f"event: {kind}\ndata: {one_line(dumps({'type': kind, **members}))}\n\n".encode("utf-8", "replace")


def sse_error(error: Exception) -> bytes:
    """The event that ends a stream which failed after its headers were sent. No `SSE_DONE` may follow it."""
    return sse_event(error_body(error))


def json_bytes(payload: Any) -> bytes:
    """`payload` as compact JSON in UTF-8."""
    return b"".join(json_pieces(payload))


def _usage_suffix(so_far: TokensSoFar) -> str:
    return f'}}],"usage":{dumps(token_counts(so_far))}}}\n\n'


def _head_members(head: ReplyHead, kind: str) -> dict[str, Any]:
    return {
        "id": head.reply_id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": None,
    }


def is_plain(delta: TextDelta, with_token_ids: bool) -> bool:
    """Whether `delta` carries text and nothing else that a client would see. Entries have a `chosen` all or none."""
    has_logprobs = bool(delta.entries) and delta.entries[0].chosen is not None
    return delta.finish_reason is None and not has_logprobs and not with_token_ids


def token_id_members(delta: TextDelta, with_token_ids: bool) -> dict[str, Any]:
    return {"token_ids": [entry.token_id for entry in delta.entries]} if with_token_ids else {}


def _all_token_ids(choice: FinishedChoice) -> dict[str, Any]:
    if choice.prompt_ids is None:
        return {}
    return {"prompt_token_ids": list(choice.prompt_ids), **token_id_members(choice.whole, with_token_ids=True)}


def _quoted(text: str) -> str:
    return one_line(encode_basestring(text))


def one_line(text: str) -> str:
    """JSON text without the characters at which some clients split lines. Three passes of `replace` take a thirtieth
    of what `translate` takes."""
    if text.isascii():
        return text
    return text.replace("\u0085", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
