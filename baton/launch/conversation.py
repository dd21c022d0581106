"""A conversation with a model: the messages so far, the next answer, and how fast it came.

Owns the messages. Does not know the terminal, nor the wire format (`baton.launch.api_client`).
Invariant: the messages sent always alternate between user and assistant, whatever failed or was stopped before.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

from baton.launch.api_client import ApiClient, chat_body


class Part(NamedTuple):
    """A piece of an answer as it came."""

    text: str
    is_reasoning: bool = False


@dataclass(slots=True)
class AnswerFigures:
    """Measurements of one answer, by a monotonic clock in seconds. `num_tokens` is None when the endpoint has not said
    it, which is so for an answer that was stopped."""

    begun_s: float
    first_s: float | None = None
    last_s: float | None = None
    num_parts: int = 0
    num_tokens: int | None = None
    is_cut_off: bool = False
    """It ended at the token limit."""

    def note_part(self, now_s: float) -> None:
        """Count a part with text, which came at `now_s`."""
        self.first_s = now_s if self.first_s is None else self.first_s
        self.last_s = now_s
        self.num_parts += 1

    def describe(self) -> str:
        """One line for a person; "" when nothing came."""
        if self.first_s is None or self.last_s is None:
            return ""
        number = self.num_parts if self.num_tokens is None else self.num_tokens
        words = [f"{'about ' if self.num_tokens is None else ''}{number} token{'' if number == 1 else 's'}"]
        if number > 1 and self.last_s > self.first_s:
            words.append(f"{(number - 1) / (self.last_s - self.first_s):.1f} tokens/s")
        return ", ".join([*words, f"the first after {self.first_s - self.begun_s:.2f} s"])


class Conversation:
    """The messages so far, and the next answer. `model`, `system` and `thinks` may be changed between answers.

    `thinks`: whether the model is to think before it answers; None: as its chat template has it.
    """

    def __init__(
        self,
        client: ApiClient,
        model: str,
        system: str = "",
        max_tokens: int | None = None,
        temperature: float | None = None,
    ) -> None:
        self.client = client
        self.model = model
        self.system = system
        self.thinks: bool | None = None
        self.figures = AnswerFigures(time.monotonic())
        """Of the newest answer."""
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages for the model: the system prompt, if there is one, and all turns."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self._turns]

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self._turns.clear()

    def take_back(self) -> str:
        """Forget the last turn of the user and its answer; the user's words, "" when there is none."""
        while self._turns:
            turn = self._turns.pop()
            if turn["role"] == "user":
                return turn["content"]
        return ""

    def answer(self, text: str) -> Generator[Part]:
        """Send one user turn and yield the answer as it comes. Raises `RequestFailed`.

        The turn stays in the conversation with as much of the answer as was read; without any it is forgotten. The
        model is not told its reasoning again.
        """
        parts: list[str] = []
        self._turns.append({"role": "user", "content": text})
        self.figures = figures = AnswerFigures(time.monotonic())
        body = chat_body(self.model, self.messages, self._max_tokens, self._temperature)
        if self.thinks is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.thinks}
        try:
            with closing(self.client.stream_chat({**body, "stream_options": {"include_usage": True}})) as chunks:
                for chunk in chunks:
                    figures.num_tokens = _num_tokens(chunk, figures.num_tokens)
                    content, reasoning, finish_reason = read_chunk(chunk)
                    if content or reasoning:
                        figures.note_part(time.monotonic())
                    parts.append(content)
                    if reasoning:
                        yield Part(reasoning, is_reasoning=True)
                    yield Part(content)
                    figures.is_cut_off = figures.is_cut_off or finish_reason == "length"
        finally:
            if any(parts):
                self._turns.append({"role": "assistant", "content": "".join(parts)})
            else:
                self._turns.pop()


def read_chunk(chunk: dict[str, object]) -> tuple[str, str, str]:
    """Text, reasoning and finish reason of one chunk, "" for what it does not have."""
    match chunk:
        case {"choices": [{**choice}]}:
            pass
        case _:
            return "", "", ""  # a chunk with the usage only
    delta = choice.get("delta")
    texts: dict[str, object] = delta if isinstance(delta, dict) else {}
    return (
        _text(texts.get("content")),
        _text(texts.get("reasoning_content")) or _text(texts.get("reasoning")),
        _text(choice.get("finish_reason")),
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _num_tokens(chunk: dict[str, object], known: int | None) -> int | None:
    match chunk:
        case {"usage": {"completion_tokens": int(number)}}:
            return number
        case _:
            return known
