"""What the `openai` client tells of an answer, put together: from a whole answer, or from the events of a stream.

Owns how events of the three interfaces become choices, which are compared with a reference while they come, and what
must hold of every answer by itself: indexes that fit, calls that keep their id, numbers of events without a gap, and
in /v1/responses an end that says what its events said. Knows neither connections nor faults.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jsonschema import Draft202012Validator

from tests.campaign.requests import RESPONSES, Body, Request

_TOKEN_PREFIX = "token_id:"
_ENDED_WELL = ("stop", "tool_calls", "completed")
Event = Mapping[str, Any]


class Wrong(Exception):
    """An answer is not what it has to be."""


class Failed(Exception):
    """An answer says that it failed."""


@dataclass(slots=True)
class Call:
    """Of a function. The id is another one for each request."""

    id: str = field(compare=False)
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Choice:
    """One choice as its client sees it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    calls: list[Call] = field(default_factory=list)

    @property
    def size(self) -> int:
        """How much was told: tokens, or letters where there are no ids of tokens."""
        return len(self.token_ids) or len(self.text) + sum(len(call.arguments) for call in self.calls)

    def take_call(self, index: int, told: Event) -> None:
        """A piece of a call. Its id and name come once, with the first piece."""
        function = told.get("function") or {}
        if index == len(self.calls):
            if not told.get("id") or not function.get("name"):
                raise Wrong(f"call {index} begins without an id or a name: {told}")
            self.calls.append(Call(told["id"], function["name"]))
        elif index > len(self.calls) or told.get("id", self.calls[index].id) != self.calls[index].id:
            raise Wrong(f"a piece of call {index} of {len(self.calls)} does not belong to it: {told}")
        self.calls[index].arguments += function.get("arguments") or ""

    def difference(self, expected: Choice) -> str:
        """Where it is not how `expected` begins; "" if it is."""
        for name in ("token_ids", "logprobs", "text"):
            have, want = getattr(self, name), getattr(expected, name)
            if have != want[: len(have)]:
                place = next((place for place, (a, b) in enumerate(zip(have, want, strict=False)) if a != b), len(want))
                shown = have[place], want[place] if place < len(want) else "the end"
                return f"{name}[{place}] is {shown[0]!r}, not {shown[1]!r} ({len(have)} of {len(want)})"
        for call, other in zip(self.calls, expected.calls, strict=False):
            if call.name != other.name or not other.arguments.startswith(call.arguments):
                return f"calls {call}, not {other}"
        return f"{len(self.calls)} calls, not {len(expected.calls)}" if len(self.calls) > len(expected.calls) else ""

    def invalid(self, schemas: Mapping[str, Body]) -> str:
        """Why what it says is not valid by the schemas that were sent; "" if it is, or was cut by its length."""
        if self.finish_reason not in _ENDED_WELL:
            return ""
        told = [(call.name, call.arguments) for call in self.calls] + [("", self.text)] * ("" in schemas)
        for name, text in told:
            try:
                error = next(Draft202012Validator(schemas[name]).iter_errors(json.loads(text)), None)
            except ValueError as cause:
                return f"{text!r} is no JSON: {cause}"
            if error is not None:
                return f"{text!r} is not valid: {error.message}"
        return "" if told or not schemas else "no function was called"


class Answer(Protocol):
    """`usage`: tokens of prompt and output, None until they are told."""

    choices: list[Choice]
    usage: tuple[int, int] | None

    def take(self, event: Event) -> None:
        """Add what an event, or a whole answer, says. Raises `Wrong` and `Failed`."""
        ...


def answer_to(request: Request) -> Answer:
    """Nothing yet."""
    return ResponseAnswer() if request.api == RESPONSES else ListedAnswer(request.num_choices)


class ListedAnswer:
    """Of chats and completions."""

    def __init__(self, num_choices: int) -> None:
        self.choices = [Choice() for _ in range(num_choices)]
        self.usage: tuple[int, int] | None = None

    def take(self, event: Event) -> None:
        """See `Answer`."""
        for told in event["choices"]:
            if not 0 <= told["index"] < len(self.choices):
                raise Wrong(f"there is no choice {told['index']}")
            choice, said = self.choices[told["index"]], told.get("delta") or told.get("message") or told
            logprobs = told.get("logprobs") or {}
            choice.token_ids += told.get("token_ids") or []
            choice.logprobs += logprobs.get("token_logprobs") or []
            choice.logprobs += [entry["logprob"] for entry in logprobs.get("content") or []]
            choice.text += said.get("content") or said.get("text") or ""
            for place, call in enumerate(said.get("tool_calls") or []):
                choice.take_call(call.get("index", place), call)
            choice.finish_reason = told.get("finish_reason") or choice.finish_reason
        if usage := event.get("usage"):
            self.usage = (usage["prompt_tokens"], usage["completion_tokens"])


class ResponseAnswer:
    """Of /v1/responses: one choice, whose calls are items of their own."""

    def __init__(self) -> None:
        self.choices = [Choice()]
        self.usage: tuple[int, int] | None = None
        self._num_events = 0

    def take(self, event: Event) -> None:
        """See `Answer`."""
        if event.get("object") == "response":
            self._end(event)
            return
        if event["sequence_number"] != self._num_events:
            raise Wrong(f"event {event['sequence_number']} came where {self._num_events} was due")
        self._num_events += 1
        (choice,) = self.choices
        match event["type"]:
            case "response.output_item.added" if event["item"]["type"] == "function_call":
                choice.calls.append(Call(event["item"]["call_id"], event["item"]["name"]))
            case "response.function_call_arguments.delta":
                choice.calls[-1].arguments += event["delta"]
            case "response.output_text.delta":
                _add_text(choice, event["delta"], event.get("logprobs") or ())
            case "response.completed" | "response.incomplete":
                self._end(event["response"])
            case "response.failed" | "error":
                raise Failed(json.dumps(dict(event))[:300])
            case _:
                pass

    def _end(self, response: Event) -> None:
        whole = _whole(response)
        told = self.choices[0]
        ids = [call.id for call in told.calls], [call.id for call in whole.calls]
        if self._num_events and (
            ids[0] != ids[1] or (told.text, told.calls, told.token_ids) != (whole.text, whole.calls, whole.token_ids)
        ):
            raise Wrong(f"its events said {told}, and its end says {whole}")
        self.choices = [whole]
        self.usage = (response["usage"]["input_tokens"], response["usage"]["output_tokens"])


def _whole(response: Event) -> Choice:
    choice = Choice(finish_reason=response["status"])
    for item in response["output"]:
        if item["type"] == "function_call":
            choice.calls.append(Call(item["call_id"], item["name"], item["arguments"]))
        for part in item.get("content") or ():
            _add_text(choice, part["text"], part.get("logprobs") or ())
    return choice


def _add_text(choice: Choice, text: str, entries: Sequence[Event]) -> None:
    choice.text += text
    choice.logprobs += [entry["logprob"] for entry in entries]
    names = [entry["token"] for entry in entries]
    choice.token_ids += [int(name.removeprefix(_TOKEN_PREFIX)) for name in names if name.startswith(_TOKEN_PREFIX)]


def judged(choices: Sequence[Choice], expected: Sequence[Choice], *, is_whole: bool) -> None:
    """Raises `Wrong` at the first choice that is not how its reference begins, or is not the reference."""
    for index, (choice, other) in enumerate(zip(choices, expected, strict=True)):
        if difference := choice.difference(other):
            raise Wrong(f"choice {index}: {difference}")
        if is_whole and choice != other:
            raise Wrong(f"choice {index} ends as {choice}, not as {other}")
        ids = [call.id for call in choice.calls]
        if "" in ids or len(set(ids)) < len(ids):
            raise Wrong(f"choice {index}: calls have the ids {ids}")
