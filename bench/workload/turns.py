"""What is asked: conversations of one or more turns, before anybody knows an answer.

Owns the shape that every dataset makes and the client sends. A request of most datasets is a conversation of one turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request adds to its conversation, and how long its answer shall be.

    `token_ids` are sent where prompts are token ids, `text` where they are text or messages. A dataset fills both when
    it has a tokenizer; `text` is "" without one.
    """

    token_ids: tuple[int, ...]
    text: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow each other: turn k + 1 is sent when turn k is answered, and its prompt holds all before it.

    `arrival_s`: when a trace says that it came, from the beginning of the trace; None where an arrival process decides.
    """

    turns: tuple[Turn, ...]
    arrival_s: float | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """What a dataset makes: `conversations` to send, and `facts` that stand beside a result, as JSON has them.

    Lengths in the facts are of what each request adds, not of the history before it.
    """

    conversations: tuple[Conversation, ...]
    facts: dict[str, Any]
