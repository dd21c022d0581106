"""Reads an answer out of the bytes that came: tokens and their times, text, usage, and what is wrong with it.

Owns the format of server-sent events and of OpenAI's stream objects, and the checks of an answer. Knows no socket: it
runs when a stream has ended, and a few events at a time, so that streams that still run get their stamps.

Invariants: how a stream was cut into pieces changes no token, only stamps; an event came when its last byte did; what
cannot be read is a failure and never an exception.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

from bench.client.outcome import Failure, Outcome

_DONE = b"[DONE]"
_FIELD = b"data:"
_SHOWN = 200

Problem: TypeAlias = tuple[Failure, str]


@dataclass(slots=True)
class Received:
    """The pieces of one body in order, and when each came (`time.monotonic()` seconds)."""

    pieces: list[bytes] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, piece: bytes, came_s: float) -> None:
        """One more piece."""
        self.pieces.append(piece)
        self.came_s.append(came_s)
        self.num_bytes += len(piece)

    @property
    def may_be_over(self) -> bool:
        """Whether the last piece ends as a stream does. A stream that is cut inside of its last line is not noticed."""
        return self.pieces[-1].rstrip().endswith(_DONE)

    def events(self) -> Iterator[tuple[float, bytes, bool]]:
        """(when its last byte came, data, whether its line was ended) of every event."""
        body = b"".join(self.pieces)
        ends = list(accumulate(map(len, self.pieces)))
        begin = place = 0
        while begin < len(body):
            newline = body.find(b"\n", begin)
            end = newline if newline >= 0 else len(body)
            if body.startswith(_FIELD, begin, end):
                while ends[place] < end:
                    place += 1
                if data := body[begin + len(_FIELD) : end].strip():
                    yield self.came_s[place], data, newline >= 0
            begin = end + 1


class AnswerReader:
    """Fills an outcome with what the events of a body say, up to [DONE], the first failure, or their end."""

    def __init__(self, received: Received, outcome: Outcome) -> None:
        self._events = received.events()
        self._outcome = outcome
        self._texts: list[str] = []
        self.is_done = False

    def read(self, num_events: int) -> Iterator[None]:
        """Read everything, with a pause after each `num_events`."""
        for number, (came_s, data, is_whole) in enumerate(self._events, 1):
            if data == _DONE:
                self.is_done = True
                break
            try:
                problem = self._take(json.loads(data), came_s)
            except (ValueError, RecursionError):
                if not is_whole:
                    break
                problem = Failure.BAD_STREAM, f"an event is not JSON: {data[:_SHOWN].decode(errors='replace')}"
            if problem is not None:
                self._outcome.failure, self._outcome.message = problem
                break
            if number % num_events == 0:
                yield
        self._outcome.text = "".join(self._texts)

    def _take(self, event: Any, came_s: float) -> Problem | None:
        if not isinstance(event, dict):
            return Failure.BAD_STREAM, f"an event is no object: {str(event)[:_SHOWN]}"
        if event.get("error") or event.get("object") == "error":
            return Failure.ERROR_EVENT, _sentence(event)
        usage, choices = event.get("usage"), event.get("choices")
        if isinstance(usage, dict):
            self._outcome.usage = usage
        if not choices:
            return None
        choice = choices[0] if isinstance(choices, list) else None
        if not isinstance(choice, dict):
            return Failure.BAD_STREAM, f"an event has unknown choices: {str(choices)[:_SHOWN]}"
        return self._take_choice(choice, came_s)

    def _take_choice(self, choice: dict[str, Any], came_s: float) -> Problem | None:
        """A choice of a chat has its text in `delta`, one of a completion has it itself."""
        delta = choice.get("delta")
        text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
        token_ids = choice.get("token_ids")
        if not isinstance(text, str | None) or not _are_ids(token_ids):
            return Failure.BAD_STREAM, f"a choice has unknown members: {str(choice)[:_SHOWN]}"
        outcome = self._outcome
        self._texts.append(text or "")
        outcome.finish_reason = str(choice.get("finish_reason") or outcome.finish_reason)
        outcome.chunk_s.append(came_s)
        if token_ids is not None:
            outcome.chunk_tokens.append(len(token_ids))
            outcome.output_ids.extend(token_ids)
        else:
            carries_one = not outcome.output_ids and (bool(text) or not _only_opens(choice))
            outcome.chunk_tokens.append(int(carries_one))
        return None


def find_problem(outcome: Outcome, body: Mapping[str, Any]) -> Problem | None:
    """What is wrong with a stream that ended well, against the request's own `body`."""
    if not sum(outcome.chunk_tokens) or outcome.usage.get("completion_tokens") == 0:
        return Failure.NO_TOKENS, f"{len(outcome.chunk_s)} events with choices, none with a token"
    num_completion = outcome.usage.get("completion_tokens")
    if num_completion is not None:
        if outcome.output_ids and num_completion != len(outcome.output_ids):
            return Failure.WRONG_USAGE, f"{num_completion} completion tokens, but {len(outcome.output_ids)} came"
        num_asked = body.get("max_tokens", body.get("max_completion_tokens"))
        has_other_end = body.get("stop") or body.get("stop_token_ids") or not body.get("ignore_eos")
        if not has_other_end and num_completion != num_asked:
            return Failure.WRONG_USAGE, f"{num_completion} completion tokens, but {num_asked} were to come"
    num_prompt, prompt = outcome.usage.get("prompt_tokens"), body.get("prompt")
    if num_prompt is not None and isinstance(prompt, list) and num_prompt != len(prompt):
        return Failure.WRONG_USAGE, f"{num_prompt} prompt tokens, but {len(prompt)} were sent"
    return None


def error_message(body: bytes) -> str:
    """The sentence in the body of an error: OpenAI's envelope, what resembles it, or how the body begins."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return body[:_SHOWN].decode(errors="replace").strip()
    return _sentence(found)


def _sentence(found: Any) -> str:
    while isinstance(found, dict):
        found = next((found[name] for name in ("error", "message", "detail") if found.get(name)), str(found))
    return str(found)[:_SHOWN]


def _are_ids(token_ids: Any) -> bool:
    return token_ids is None or (isinstance(token_ids, list) and all(type(item) is int for item in token_ids))


def _only_opens(choice: dict[str, Any]) -> bool:
    """Whether a choice without text or ids stands for no token: a chat's role, or the ids of the prompt."""
    delta = choice.get("delta")
    has_opening = "prompt_token_ids" in choice or (isinstance(delta, dict) and "role" in delta)
    return has_opening and not choice.get("finish_reason")
