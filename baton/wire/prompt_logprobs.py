"""Log probabilities of prompt tokens as bytes: one row of 32-bit words for each token, little endian.

    f32 logprob | u32 rank | num_top x u32 token id | num_top x f32 logprob

Owns that format, which nodes write and the router reads when it renders an answer. In between it stays bytes: a prompt
of 4,096 tokens with 20 alternatives is 0.7 MB this way, and would be 6 MB as numbers of Python.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

_WORD_BYTES = 4
_FIXED_WORDS = 2


class PromptTokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities, given the tokens before: of the prompt's token, and of the most likely ones,
    best first. `rank`: 1 for the most likely token of all.
    """

    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


def row_words(num_top: int) -> int:
    """32-bit words of a row."""
    return _FIXED_WORDS + 2 * num_top


def num_top_of(rows: bytes, num_rows: int) -> int:
    """The alternatives in each of `num_rows` rows. Raises `ValueError` for bytes that are no such rows."""
    num_words, rest = divmod(len(rows), _WORD_BYTES * num_rows)
    num_top = (num_words - _FIXED_WORDS) // 2
    if rest or num_top < 0 or num_words != row_words(num_top):
        raise ValueError(f"{len(rows)} bytes are no {num_rows} rows of log probabilities")
    return num_top


def read_rows(rows: bytes, num_rows: int) -> Iterator[PromptTokenLogprobs]:
    """The `num_rows` rows in `rows`. Raises `ValueError` for bytes that are no such rows."""
    num_top = num_top_of(rows, num_rows)
    for logprob, rank, *top in _row(num_top).iter_unpack(rows):
        yield PromptTokenLogprobs(logprob, rank, tuple(top[:num_top]), tuple(top[num_top:]))


@cache
def _row(num_top: int) -> struct.Struct:
    return struct.Struct(f"<fI{num_top}I{num_top}f")
