"""Runs of tokens with their text: what prompts are put together from.

Owns the random numbers of a workload, the agreement of ids and text in their number of tokens, and the facts that every
dataset has. Knows no dataset.
Invariant: two uses of a seed never share a stream, or prompt lengths would go with the gaps between arrivals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.workload.dataset_settings import DatasetSettings
from bench.workload.turns import Conversation, Turn, Workload
from bench.workload.vocabulary import Vocabulary
from wire.errors import InvalidSetting

_MAX_TRIES = 10


@dataclass(frozen=True, slots=True)
class Passage:
    """`num_surplus`: tokens that the text has more than was asked for (below 0: fewer)."""

    token_ids: tuple[int, ...]
    text: str
    num_surplus: int = 0


def generator(seed: int, use: str) -> np.random.Generator:
    """The stream of `seed` for `use`. Raises `InvalidSetting` for a negative seed."""
    if seed < 0:
        raise InvalidSetting(f"--seed {seed} is not at least 0")
    return np.random.default_rng([seed, *use.encode()])


def lengths_around(mean: int, range_ratio: float, num: int, lowest: int, random: np.random.Generator) -> list[int]:
    """`num` lengths, uniform over the whole numbers from floor(mean * (1 - ratio)) to ceil(mean * (1 + ratio)).

    The bounds are those of `vllm bench serve`; both are raised to `lowest`.
    """
    low = max(lowest, math.floor(mean * (1 - range_ratio)))
    high = max(lowest, math.ceil(mean * (1 + range_ratio)))
    return [int(length) for length in random.integers(low, high + 1, size=num)]


def draw_ids(vocabulary: Vocabulary, num: int, random: np.random.Generator) -> tuple[int, ...]:
    """`num` ids of those that prompts are made of, each as likely."""
    drawn = vocabulary.drawn_ids
    return tuple(drawn[index] for index in random.integers(0, len(drawn), size=max(num, 0)).tolist())


def fitted(vocabulary: Vocabulary, token_ids: tuple[int, ...], random: np.random.Generator) -> Passage:
    """`token_ids` with their text, changed where that is needed for the text to have as many tokens.

    The text is tokenised again; what is too long is cut, what is too short gets further tokens, as often as
    `vllm bench serve` does it. Without a tokenizer the ids stay and the text is "".
    """
    if not vocabulary.has_text or not token_ids:
        return Passage(token_ids, "")
    num = len(token_ids)
    text = vocabulary.text_of(token_ids)
    found = vocabulary.ids_of(text)
    for _ in range(_MAX_TRIES):
        if len(found) == num:
            break
        text = vocabulary.text_of(found[:num] + draw_ids(vocabulary, num - len(found), random))
        found = vocabulary.ids_of(text)
    return Passage(found, text, len(found) - num)


def exact(vocabulary: Vocabulary, token_ids: tuple[int, ...]) -> Passage:
    """`token_ids` as they are, for prompts whose prefixes have to stay; the text may differ in its number of tokens."""
    if not vocabulary.has_text or not token_ids:
        return Passage(token_ids, "")
    text = vocabulary.text_of(token_ids)
    return Passage(token_ids, text, len(vocabulary.ids_of(text)) - len(token_ids))


def first_turn(vocabulary: Vocabulary, passage: Passage, num_output_tokens: int) -> Turn:
    """A turn that begins a conversation: with the opening that a server adds to the text."""
    return Turn(vocabulary.opening_ids + passage.token_ids, passage.text, num_output_tokens)


def num_after_opening(vocabulary: Vocabulary, num: int) -> int:
    """Tokens of a prompt of `num` tokens that are not its opening; at least 1, so that no text is empty."""
    return max(num - len(vocabulary.opening_ids), 1)


def described(
    settings: DatasetSettings,
    conversations: Sequence[Conversation],
    passages: Sequence[Passage],
    facts: Mapping[str, Any],
) -> Workload:
    """A workload with the facts that every dataset has, and `facts` of its own. `conversations` are not empty."""
    turns = [turn for conversation in conversations for turn in conversation.turns]
    off = [abs(passage.num_surplus) for passage in passages if passage.num_surplus]
    common = {
        "name": settings.dataset_name,
        "seed": settings.seed,
        "num_conversations": len(conversations),
        "num_requests": len(turns),
        "input_tokens": _length_facts([len(turn.token_ids) for turn in turns]),
        "output_tokens": _length_facts([turn.num_output_tokens for turn in turns]),
        # passages that have another number of tokens as text, and by how many tokens in all
        "text_mismatch": {"num_prompts": len(off), "num_tokens": sum(off)},
    }
    return Workload(tuple(conversations), {**common, **facts})


def _length_facts(lengths: Sequence[int]) -> dict[str, float]:
    return {
        "mean": round(float(np.mean(lengths)), 3),
        "median": float(np.median(lengths)),
        "max": max(lengths),
        "total": sum(lengths),
    }
