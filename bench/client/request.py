"""What is sent: the body of each request of a conversation, built from the turns and from the answers so far.

Owns the three forms of a prompt (token ids, text, messages) and how a conversation grows. Sends nothing.

Invariant: the prompt of turn k + 1 begins with the whole prompt of turn k and its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any, Literal, TypeAlias

from bench.client.endpoint import Endpoint
from bench.client.outcome import Outcome
from bench.workload.turns import Conversation, Turn
from wire.errors import InvalidSetting

PromptForm: TypeAlias = Literal["ids", "text", "chat"]


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What all requests of a run share. `temperature` None leaves it to the server; `extra_body` overrides members."""

    prompt_form: PromptForm = "ids"
    ignore_eos: bool = False
    temperature: float | None = None
    extra_body: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    with_timings: bool = False


def check_requests(endpoints: Sequence[Endpoint], conversations: Sequence[Conversation], form: PromptForm) -> None:
    """Raise `InvalidSetting` when an endpoint does not take this form of prompt, or a turn has none in it."""
    for endpoint in endpoints:
        if (endpoint.kind == "chat") != (form == "chat"):
            raise InvalidSetting(f"{endpoint.url} takes no prompts in the form {form!r}")
    for index, conversation in enumerate(conversations):
        for turn in conversation.turns:
            if not (turn.token_ids if form == "ids" else turn.text):
                raise InvalidSetting(
                    f"conversation {index} has no {form} to send: it needs a tokenizer or longer turns"
                )


class History:
    """One conversation as far as it has got."""

    def __init__(self, conversation: Conversation, endpoint: Endpoint, options: RequestOptions) -> None:
        self._turns = conversation.turns
        self._endpoint = endpoint
        self._options = options
        self._num_asked = 0
        self._ids: list[int] = []
        self._text = ""
        self._messages: list[dict[str, str]] = []
        self.num_prompt_tokens = 0

    @property
    def num_left(self) -> int:
        """Turns that were not asked for yet."""
        return len(self._turns) - self._num_asked

    def next_body(self) -> dict[str, Any]:
        """The body of the next turn's request. `num_prompt_tokens` is then its length, as far as known."""
        turn = self._turns[self._num_asked]
        self._num_asked += 1
        self.num_prompt_tokens += len(turn.token_ids)
        body: dict[str, Any] = {"model": self._endpoint.model, **self._prompt(turn), "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self._options.temperature is not None:
            body["temperature"] = self._options.temperature
        if self._options.ignore_eos:
            body["ignore_eos"] = True
        if self._options.prompt_form == "ids" and self.num_left:
            body["return_token_ids"] = True
        if self._options.with_timings and self._endpoint.is_baton:
            body["return_timings"] = True
        return body | self._options.extra_body

    def add_answer(self, outcome: Outcome) -> None:
        """Put the answer of the last request behind its prompt.

        Where the server does not tell the ids of its tokens, ids of the turn before stand for them: the length is right
        then, but a prefix cache finds no answers.
        """
        form = self._options.prompt_form
        if form == "ids":
            filler = islice(cycle(self._turns[self._num_asked - 1].token_ids), outcome.num_output_tokens)
            self._ids.extend(outcome.output_ids or filler)
        elif form == "text":
            self._text += outcome.text
        else:
            self._messages.append({"role": "assistant", "content": outcome.text})
        self.num_prompt_tokens += outcome.num_output_tokens

    def _prompt(self, turn: Turn) -> dict[str, Any]:
        form = self._options.prompt_form
        if form == "chat":
            self._messages.append({"role": "user", "content": turn.text})
            return {"messages": list(self._messages), "max_completion_tokens": turn.num_output_tokens}
        if form == "text":
            self._text += turn.text
            return {"prompt": self._text, "max_tokens": turn.num_output_tokens}
        self._ids.extend(turn.token_ids)
        return {"prompt": list(self._ids), "max_tokens": turn.num_output_tokens}
