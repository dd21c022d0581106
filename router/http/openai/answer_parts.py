"""The parts of the answers to one chat request: their content, reasoning and calls, as members of OpenAI's objects.

Owns a parser for each choice and the ids of its calls. Log probabilities, token ids and usage are of all tokens,
whatever part they belong to.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from baton.engine.text.answers.deltas import Delta, JoinedAnswer, Reasoning, join_answer
from baton.engine.text.answers.reader import AnswerParser
from baton.engine.text.choice_text import TextDelta
from baton.router.http.openai.logprob_formats import chat_logprobs
from baton.router.http.openai.replies import ChatStream, FinishedChoice, ReplyHead, is_plain, one_line, token_id_members
from baton.router.http.openai.usage import TokensSoFar, Usage
from baton.wire.messages.output import FINISH_STOP

FINISH_CALLS = "tool_calls"
ID_LENGTH = 9
"""Mistral's templates take no other ids."""
_HIDDEN = (
    "the answer is empty because all of its tokens are reasoning, which {} leaves out: raise max_tokens, or set {}"
)
_FIELDS = ("include_reasoning false", "thinking_token_budget")


class ChoiceParts:
    """One choice. `push` takes its text, piece by piece."""

    def __init__(self, parser: AnswerParser) -> None:
        self.has_text = False
        """Whether there is any content, or a call."""
        self._parser = parser
        self._token_offsets: list[int] = []

    def push(self, delta: TextDelta) -> list[Delta]:
        """The next piece; the last one ends the choice."""
        self._token_offsets += [entry.text_offset for entry in delta.entries]
        deltas = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            deltas += self._parser.finish()
        self.has_text = self.has_text or any(not isinstance(each, Reasoning) for each in deltas)
        return deltas

    def finish_reason(self, reason: str | None) -> str | None:
        """Why the choice ended, as clients are told."""
        return FINISH_CALLS if reason == FINISH_STOP and self._parser.num_calls else reason

    def warnings(self, shown_by: str, budget: str) -> tuple[str, ...]:
        """What is to be said of an answer that has ended and shows no reasoning: that it is empty for that. `shown_by`
        and `budget`: the fields that show it, and bound it."""
        is_hidden = not self.has_text and self.num_reasoning_tokens > 0
        return (_HIDDEN.format(shown_by, budget),) if is_hidden else ()

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens whose text begins inside of reasoning."""
        found, offsets = 0, self._token_offsets
        for start, end in self._parser.reasoning_spans:
            found += (len(offsets) if end is None else bisect_left(offsets, end)) - bisect_left(offsets, start)
        return found


class AnswerParts:
    """The choices of one request, by index. `new_parser` makes the parser of one, `id_of` ids, see `ReplyHead`."""

    def __init__(
        self, new_parser: Callable[[], AnswerParser], id_of: Callable[[str], str], *, shows_reasoning: bool
    ) -> None:
        self._new_parser = new_parser
        self._id_of = id_of
        self._shows_reasoning = shows_reasoning
        self._choices: dict[int, ChoiceParts] = {}

    def choice(self, index: int) -> ChoiceParts:
        """The choice with this index."""
        if index not in self._choices:
            self._choices[index] = ChoiceParts(self._new_parser())
        return self._choices[index]

    def finished(self, choices: Sequence[FinishedChoice], usage: Usage) -> tuple[list[FinishedChoice], Usage]:
        """The choices of an answer that is not streamed, told apart, and its usage."""
        return [self._finished(choice) for choice in choices], self.with_reasoning(usage)

    def _finished(self, choice: FinishedChoice) -> FinishedChoice:
        message = self._message(choice.index, join_answer(self.choice(choice.index).push(choice.whole)))
        reason = self.choice(choice.index).finish_reason(choice.whole.finish_reason)
        return replace(choice, whole=choice.whole._replace(finish_reason=reason), message=message)

    def _message(self, index: int, whole: JoinedAnswer) -> dict[str, Any]:
        members: dict[str, Any] = {"content": whole.content or (None if whole.calls else "")}
        if self._shows_reasoning:
            members |= _reasoning(whole)
        if whole.calls:
            members["tool_calls"] = self._calls(index, whole, is_streamed=False)
        return members

    def delta(self, index: int, piece: TextDelta) -> dict[str, Any]:
        """The members of the delta that tells the next piece of a choice."""
        joined = join_answer(self.choice(index).push(piece))
        members: dict[str, Any] = {"content": joined.content} if joined.content else {}
        if self._shows_reasoning:
            members |= _reasoning(joined)
        if joined.calls:
            members["tool_calls"] = self._calls(index, joined, is_streamed=True)
        return members

    def warnings(self, index: int) -> tuple[str, ...]:
        """What is to be said of a choice that has ended: that it is empty, for reasoning that nobody is shown."""
        return () if self._shows_reasoning else self.choice(index).warnings(*_FIELDS)

    def with_reasoning(self, usage: Usage) -> Usage:
        """`usage`, and in it the tokens of reasoning."""
        return replace(usage, num_reasoning_tokens=sum(each.num_reasoning_tokens for each in self._choices.values()))

    def _calls(self, index: int, joined: JoinedAnswer, *, is_streamed: bool) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []
        for number, call in sorted(joined.calls.items()):
            rendered: dict[str, Any] = {"index": number} if is_streamed else {}
            if number in joined.begun:
                rendered |= {"id": self._id_of(f"choice {index} call {number}")[:ID_LENGTH], "type": "function"}
                rendered["function"] = {"name": call.name, "arguments": call.arguments}
            else:
                rendered["function"] = {"arguments": call.arguments}
            calls.append(rendered)
        return calls


class PartedChatStream(ChatStream):
    """`ReplyStream` of /v1/chat/completions for answers that are told apart."""

    def __init__(self, head: ReplyHead, include_usage: bool, with_token_ids: bool, parts: AnswerParts) -> None:
        super().__init__(head, include_usage, with_token_ids)
        self._parts = parts

    def chunk(self, index: int, delta: TextDelta, so_far: TokensSoFar | None = None) -> bytes:
        """The next piece; nothing where it has nothing to tell yet."""
        members = self._parts.delta(index, delta)
        rendered = f'"delta":{one_line(json.dumps(members, ensure_ascii=False, separators=(",", ":")))}'
        if is_plain(delta, self._with_token_ids):
            return self._frame.plain_event(index, rendered, so_far) if members else b""
        reason = self._parts.choice(index).finish_reason(delta.finish_reason)
        if delta.finish_reason is not None:
            self._frame.warn(self._parts.warnings(index))
        told = {"logprobs": chat_logprobs(delta.entries), "finish_reason": reason}
        event = self._frame.event(index, rendered, told | token_id_members(delta, self._with_token_ids), so_far)
        return self._frame.with_warnings(event)

    async def usage(self, usage: Usage) -> bytes:
        return await super().usage(self._parts.with_reasoning(usage))


def chat_stream(head: ReplyHead, include_usage: bool, with_token_ids: bool, parts: AnswerParts | None) -> ChatStream:
    """The stream of a chat; without `parts` all its text is content."""
    if parts is None:
        return ChatStream(head, include_usage, with_token_ids)
    return PartedChatStream(head, include_usage, with_token_ids, parts)


def _reasoning(joined: JoinedAnswer) -> dict[str, str]:
    """Reasoning under both names that clients know."""
    return {"reasoning_content": joined.reasoning, "reasoning": joined.reasoning} if joined.reasoning else {}
