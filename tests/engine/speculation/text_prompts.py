"""Prompts whose answers repeat text, by kind, and some whose answers do not. The texts are the repository's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).parents[3]
_SOURCES = ("baton/engine/scheduler/first_tokens.py", "baton/wire/request_key.py", "baton/engine/cache/hashing.py")
_RENAMED = (("request", "job"), ("token", "symbol"))
_PEOPLE = (
    ("Ada Lovelace", "London", 1815),
    ("Alan Turing", "London", 1912),
    ("Grace Hopper", "New York", 1906),
    ("Emmy Noether", "Erlangen", 1882),
    ("Leonhard Euler", "Basel", 1707),
    ("Carl Friedrich Gauss", "Braunschweig", 1777),
    ("Sofia Kovalevskaya", "Moscow", 1850),
    ("Srinivasa Ramanujan", "Erode", 1887),
)
_QUESTIONS = (
    "Why is the sky blue?",
    "What should I cook tonight with rice, eggs and spinach?",
    "Tell me a short story about a lighthouse keeper who finds a letter.",
    "Explain how a bicycle stays upright.",
    "How do I prepare for a job interview as a nurse?",
    "What is the difference between a virus and a bacterium?",
    "Describe a walk through an old town in autumn.",
    "Give advice to somebody who moves to another country.",
)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """What a user says, by its kind. `prediction`: what the answer may be like."""

    kind: str
    text: str
    prediction: str = ""


def text_prompts() -> list[TextPrompt]:
    """All of them, a few of each kind."""
    return [*_edits(), *_quotes(), *_tables(), *_records(), *(TextPrompt("chat", text) for text in _QUESTIONS)]


def _edits() -> Iterator[TextPrompt]:
    for source in _SOURCES:
        lines = (ROOT / source).read_text().splitlines()
        code = "\n".join(lines[len(lines) // 3 :][:28])
        for old, new in _RENAMED:
            told = f'Rewrite this Python code with "{old}" renamed to "{new}". Answer with all of it, nothing else.'
            yield TextPrompt("edit", f"{told}\n\n```python\n{code}\n```", f"```python\n{code}\n```")


def _quotes() -> Iterator[TextPrompt]:
    text = (ROOT / "docs" / "architecture.md").read_text()
    passages = [each for each in text.split("\n\n") if len(each) > 250 and not each.startswith(("|", "#", "    ", "`"))]
    for number in range(0, min(len(passages) - 3, 18), 3):
        told = "\n\n".join(passages[number : number + 3])
        yield TextPrompt("quote", f"Here is a text.\n\n{told}\n\nRepeat its second paragraph word for word.")


def _tables() -> Iterator[TextPrompt]:
    rows = [f"| {name} | {place} | {year} |" for name, place, year in _PEOPLE]
    for count in range(3, 9):
        table = "\n".join(["| name | born in | year |", "|---|---|---|", *islice(rows, count)])
        yield TextPrompt("table", f"Repeat this table with one more column, the century.\n\n{table}")


def _records() -> Iterator[TextPrompt]:
    example = '[\n  {"name": "Marie Curie", "born_in": "Warsaw", "year": 1867, "is_alive": false},\n  ...\n]'
    for first in range(6):
        told = "; ".join(f"{name}, {place}, {year}" for name, place, year in (_PEOPLE * 2)[first : first + 5])
        yield TextPrompt("json", f"Write these people as JSON like this:\n{example}\n\nPeople: {told}")
