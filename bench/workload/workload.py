"""What a dataset makes: conversations to send, and what has to be said about them beside a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.workload.dataset_settings import DatasetSettings
from bench.workload.passages import Passage, length_facts, text_mismatch
from bench.workload.turns import Conversation


@dataclass(frozen=True, slots=True)
class Workload:
    """`facts` can be written as JSON. Lengths in them are of what each request adds, not of the history before it."""

    conversations: tuple[Conversation, ...]
    facts: dict[str, Any]


def described(
    settings: DatasetSettings,
    conversations: Sequence[Conversation],
    passages: Sequence[Passage],
    facts: Mapping[str, Any],
) -> Workload:
    """A workload with the facts that every dataset has, and `facts` of its own. `conversations` are not empty."""
    turns = [turn for conversation in conversations for turn in conversation.turns]
    common = {
        "name": settings.dataset_name,
        "seed": settings.seed,
        "num_conversations": len(conversations),
        "num_requests": len(turns),
        "input_tokens": length_facts([len(turn.token_ids) for turn in turns]),
        "output_tokens": length_facts([turn.num_output_tokens for turn in turns]),
        "text_mismatch": text_mismatch(passages),
    }
    return Workload(tuple(conversations), {**common, **facts})
