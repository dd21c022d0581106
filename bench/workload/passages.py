"""What prompts are put together from: the token ids of a model, the text of some, and the facts that every dataset has.

Owns the choice of ids that random prompts are drawn from, and the random numbers of a workload. With a tokenizer the
ids are whole words if it has enough: tokens of a space and letters, which come back as themselves wherever they stand,
so that a prompt as text has the tokens and the shared prefixes of the same prompt as ids. Of a vocabulary with few
words ids are drawn from all of it, and there is no text. Knows no dataset.

Invariants: special ids, and ids that no token has, are never drawn; two uses of a seed never share a stream, or prompt
lengths would go with the gaps between arrivals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from baton.bench.workload.dataset_settings import DatasetSettings, Prompt, Workload
from baton.engine.text.tokenizer import Tokenizer
from baton.wire.errors import InvalidSetting

# trying a candidate costs 10 to 20 us; a few thousand are enough for prompts that differ
_MAX_DRAWN = 4096
_MIN_WORDS = 256


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`drawn_ids`: what random prompts are made of. `opening_ids`: what a server puts before the tokens of a text,
    usually bos. Without a tokenizer there is no text."""

    drawn_ids: tuple[int, ...] = field(repr=False)
    opening_ids: tuple[int, ...] = ()
    tokenizer: Tokenizer | None = None

    def text_of(self, ids: Sequence[int]) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode(ids)


def vocabulary_of(folder: Path) -> Vocabulary:
    """The vocabulary of the checkpoint in `folder`. Raises `ModelLoadError`, `InvalidSetting`."""
    tokenizer = Tokenizer.from_folder(folder)
    special_ids = {*tokenizer.eos_token_ids, tokenizer.bos_token_id}
    named = (at for at in range(tokenizer.vocab_size) if tokenizer.vocabulary_piece(at, True) is not None)
    ordinary = tuple(token_id for token_id in named if token_id not in special_ids)
    if not ordinary:
        raise InvalidSetting(f"--tokenizer {folder}: it has no token that a prompt could be made of")
    words = _first_steady(tokenizer, (token_id for token_id in ordinary if _is_word(tokenizer.token_text(token_id))))
    if len(words) < _MIN_WORDS:
        return Vocabulary(ordinary, _opening_ids(tokenizer))
    return Vocabulary(words, _opening_ids(tokenizer), tokenizer)


def bare_vocabulary(size: int) -> Vocabulary:
    """Ids below `size` without text or special ones."""
    return Vocabulary(tuple(range(size)))


def _is_word(text: str) -> bool:
    return text[:1] == " " and text[1:].isascii() and text[1:].isalpha()


def _first_steady(tokenizer: Tokenizer, candidates: Iterable[int]) -> tuple[int, ...]:
    """The first of `candidates` that come back from their text when they stand beside themselves."""
    steady = (
        token_id
        for token_id in candidates
        if tokenizer.encode(tokenizer.decode([token_id] * 2), add_special_tokens=False) == [token_id] * 2
    )
    return tuple(islice(steady, _MAX_DRAWN))


def _opening_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    text = "a"
    whole, bare = tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)
    return tuple(whole[: len(whole) - len(bare)]) if whole[-len(bare) :] == bare else ()


def generator(seed: int, use: str) -> np.random.Generator:
    """The stream of `seed` for `use`."""
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


def opened(
    vocabulary: Vocabulary, ids: tuple[int, ...], num_output_tokens: int, arrival_s: float | None = None
) -> Prompt:
    """A prompt of `ids`, with the opening that a server adds to their text."""
    return Prompt(vocabulary.opening_ids + ids, vocabulary.text_of(ids), num_output_tokens, arrival_s)


def num_after_opening(vocabulary: Vocabulary, num: int) -> int:
    """Tokens of a prompt of `num` tokens that are not its opening; at least 1, so that no text is empty."""
    return max(num - len(vocabulary.opening_ids), 1)


def described(settings: DatasetSettings, prompts: Sequence[Prompt], facts: Mapping[str, Any]) -> Workload:
    """A workload with the facts that every dataset has, and `facts` of its own. `prompts` are not empty."""
    common = {
        "name": settings.dataset_name,
        "seed": settings.seed,
        "num_requests": len(prompts),
        "input_tokens": _length_facts([len(prompt.token_ids) for prompt in prompts]),
        "output_tokens": _length_facts([prompt.num_output_tokens for prompt in prompts]),
    }
    return Workload(tuple(prompts), {**common, **facts})


def _length_facts(lengths: Sequence[int]) -> dict[str, float]:
    mean, median = round(float(np.mean(lengths)), 3), float(np.median(lengths))
    return {"mean": mean, "median": median, "max": max(lengths), "total": sum(lengths)}
