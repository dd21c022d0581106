"""What prompts can be written with: the token ids of a model, and their text where there is a tokenizer.

Owns the choice of ids that random prompts are drawn from. With a tokenizer they are whole words if it has enough:
tokens of a space and letters, which come back as themselves wherever they stand, so that a prompt as text has the
tokens and the shared prefixes of the same prompt as ids. Else they are tokens that do so at least beside themselves,
which leaves out parts of characters. Knows no dataset.

Invariant: special ids, and ids that no token has, are never drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from engine.text.tokenizer import Tokenizer
from wire.errors import InvalidSetting

# trying a candidate costs 10 to 20 us; a few thousand are enough for prompts that differ
_MAX_DRAWN = 4096
_MIN_WORDS = 256


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
        """Whether ids have a text."""
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
