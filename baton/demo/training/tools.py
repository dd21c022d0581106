"""A tool as the texts of the demo model know it: its signature, a call of it, and a task that calls solve."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from baton.demo.training.phrasing import invented_word, one_of, sentence, words

Values = Mapping[str, object]


@dataclass(frozen=True)
class Tool:
    """A function as the model sees it. `parameters`: type by name; a name that ends with "?" is optional."""

    name: str
    parameters: Mapping[str, str]
    description: str = ""

    def signature(self) -> str:
        """The line in the system message, as the chat template writes it."""
        inside = ", ".join(f"{name}: {kind}" for name, kind in self.parameters.items())
        return f"{self.name}({inside})" + (f" - {self.description}" if self.description else "")


@dataclass(frozen=True)
class Call:
    """One call and what the tool says."""

    tool: Tool
    arguments: Values
    said: str


@dataclass(frozen=True)
class Task:
    """A question, the calls of each round (those of a round are made at once), and the answer.

    `facts`: the answer as values by name, for a tool or a schema that takes them.
    """

    question: str
    rounds: tuple[tuple[Call, ...], ...]
    answer: str
    facts: Values


def other_tool(rng: random.Random) -> Tool:
    """A tool that nobody needs."""
    verb = one_of(rng, "send", "create", "delete", "play", "open", "book", "set", "list", "read", "update", "roll")
    noun = one_of(
        rng, "email", "event", "file", "music", "door", "flight", "alarm", "files", "stock_price", "dice", "user",
        "order", invented_word(rng).lower(),
    )  # fmt: skip
    names = rng.sample(
        words("to name path title text id count date user amount city subject enabled"), rng.randrange(4)
    )
    kinds = ("string", "string", "string", "integer", "number", "boolean")
    parameters = {name + one_of(rng, "", "", "?"): rng.choice(kinds) for name in names}
    return Tool(f"{verb}_{noun}", parameters, described(rng, f"{sentence(verb)} {noun.replace('_', ' ')}."))


def described(rng: random.Random, *descriptions: str) -> str:
    """Return one of the descriptions, or none."""
    if rng.random() < 0.2:
        return ""
    text = one_of(rng, *descriptions)
    return text.rstrip(".") if rng.random() < 0.3 else text
