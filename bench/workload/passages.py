"""What prompts are put together from: the token ids of a model, and runs of them with their text.

Owns the choice of ids that random prompts are drawn from, the random numbers of a workload, the agreement of ids and
text in their number of tokens, and the facts that every dataset has. With a tokenizer the ids are whole words if it has
enough: tokens of a space and letters, which come back as themselves wherever they stand, so that a prompt as text has
the tokens and the shared prefixes of the same prompt as ids. Else they are tokens that do so at least beside
themselves, which leaves out parts of characters. Knows no dataset.

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
_MAX_TRIES = 10


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`size`: one more than the highest id. `opening_ids`: what a server puts before the tokens of a text, usually bos.

    `drawn_ids`: what random prompts are made of.
    """

    size: int
    special_ids: frozenset[int]
    drawn_ids: tuple[int, ...] = field(repr=False)
    opening_ids: tuple[int, ...] = ()
    tokenizer: Tokenizer | None = None

    @property
    def has_text(self) -> bool:
        return self.tokenizer is not None

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out; "" without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(ids)

    def ids_of(self, text: str) -> tuple[int, ...]:
        """The ids of `text`, without the opening. Raises `InvalidSetting` without a tokenizer, `InvalidRequest`."""
        if self.tokenizer is None:
            raise InvalidSetting("a text needs a tokenizer: name its folder with --tokenizer")
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))


def vocabulary_of(folder: Path) -> Vocabulary:
    """The vocabulary of the checkpoint in `folder`. Raises `ModelLoadError`, `InvalidSetting`."""
    tokenizer = Tokenizer.from_folder(folder)
    size = tokenizer.vocab_size
    silent = (token_id for token_id in range(size) if tokenizer.vocabulary_piece(token_id, True) is None)
    bos = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
    special_ids = frozenset((*silent, *tokenizer.eos_token_ids, *bos))
    ordinary = tuple(token_id for token_id in range(size) if token_id not in special_ids)
    if not ordinary:
        raise InvalidSetting(f"--tokenizer {folder}: it has no token that a prompt could be made of")
    words = _first_steady(tokenizer, (token_id for token_id in ordinary if _is_word(tokenizer.token_text(token_id))))
    return Vocabulary(
        size=size,
        special_ids=special_ids,
        drawn_ids=words if len(words) >= _MIN_WORDS else _first_steady(tokenizer, ordinary) or ordinary,
        opening_ids=_opening_ids(tokenizer),
        tokenizer=tokenizer,
    )


def bare_vocabulary(size: int) -> Vocabulary:
    """Ids below `size` without text or special ones. Raises `InvalidSetting`."""
    if size < 1:
        raise InvalidSetting(f"a vocabulary of {size} tokens has none that a prompt could be made of")
    return Vocabulary(size=size, special_ids=frozenset(), drawn_ids=tuple(range(size)))


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
    text, num, found = "", len(token_ids), token_ids
    for _ in range(1 + _MAX_TRIES):
        text = vocabulary.text_of(found[:num] + draw_ids(vocabulary, num - len(found), random))
        found = vocabulary.ids_of(text)
        if len(found) == num:
            break
    return Passage(found, text, len(found) - num)


def drawn(vocabulary: Vocabulary, num: int, random: np.random.Generator, prefix: tuple[int, ...] = ()) -> Passage:
    """`prefix` and `num` ids drawn after it, `fitted`."""
    return fitted(vocabulary, prefix + draw_ids(vocabulary, num, random), random)


def exact(vocabulary: Vocabulary, token_ids: tuple[int, ...]) -> Passage:
    """`token_ids` as they are, for prompts whose prefixes have to stay; the text may differ in its number of tokens."""
    if not vocabulary.has_text or not token_ids:
        return Passage(token_ids, "")
    text = vocabulary.text_of(token_ids)
    return Passage(token_ids, text, len(vocabulary.ids_of(text)) - len(token_ids))


def opened(vocabulary: Vocabulary, passage: Passage, num_output_tokens: int, arrival_s: float | None = None) -> Prompt:
    """A prompt with the opening that a server adds to the text."""
    return Prompt(vocabulary.opening_ids + passage.token_ids, passage.text, num_output_tokens, arrival_s)


def num_after_opening(vocabulary: Vocabulary, num: int) -> int:
    """Tokens of a prompt of `num` tokens that are not its opening; at least 1, so that no text is empty."""
    return max(num - len(vocabulary.opening_ids), 1)


def described(
    settings: DatasetSettings,
    prompts: Sequence[Prompt],
    passages: Sequence[Passage],
    facts: Mapping[str, Any],
) -> Workload:
    """A workload with the facts that every dataset has, and `facts` of its own. `prompts` are not empty."""
    off = [abs(passage.num_surplus) for passage in passages if passage.num_surplus]
    common = {
        "name": settings.dataset_name,
        "seed": settings.seed,
        "num_requests": len(prompts),
        "input_tokens": _length_facts([len(prompt.token_ids) for prompt in prompts]),
        "output_tokens": _length_facts([prompt.num_output_tokens for prompt in prompts]),
        # passages that have another number of tokens as text, and by how many tokens in all
        "text_mismatch": {"num_prompts": len(off), "num_tokens": sum(off)},
    }
    return Workload(tuple(prompts), {**common, **facts})


def _length_facts(lengths: Sequence[int]) -> dict[str, float]:
    mean, median = round(float(np.mean(lengths)), 3), float(np.median(lengths))
    return {"mean": mean, "median": median, "max": max(lengths), "total": sum(lengths)}
