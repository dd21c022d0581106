"""The parts of an answer, piece by piece.

Joined by kind (and by call), the pieces are the whole answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias


class Content(NamedTuple):
    """Text for the user."""

    text: str


class Reasoning(NamedTuple):
    """Text by which the model came to its answer."""

    text: str


class CallBegun(NamedTuple):
    """The model calls the function `name`; calls are numbered from 0."""

    call: int
    name: str


class Arguments(NamedTuple):
    """The next text of a call's arguments, which are JSON when they are whole."""

    call: int
    text: str


Delta: TypeAlias = Content | Reasoning | CallBegun | Arguments


@dataclass(slots=True)
class Call:
    """One call as a whole; `arguments` is JSON unless the answer was cut."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class JoinedAnswer:
    """All deltas of an answer, or of a piece of one, put together. `begun`: the numbers of calls that began here."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, Call] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)


def join_answer(deltas: Iterable[Delta]) -> JoinedAnswer:
    """The deltas put together. A call that began before them has no name here."""
    whole = JoinedAnswer()
    content: list[str] = []
    reasoning: list[str] = []
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        match delta:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallBegun(call, name):
                whole.calls[call] = Call(name)
                whole.begun.add(call)
            case Arguments(call, text):
                arguments.setdefault(call, []).append(text)
    whole.content, whole.reasoning = "".join(content), "".join(reasoning)
    for call, texts in arguments.items():
        whole.calls.setdefault(call, Call("")).arguments = "".join(texts)
    return whole
