"""Prompts that carry a number, by which a fake node knows whose tokens it tells."""

from __future__ import annotations

from collections.abc import Sequence

_BASE = 100
_NUM_DIGITS = 3
MAX_PROMPTS = _BASE**_NUM_DIGITS


def numbered_prompt(number: int, num_tokens: int) -> list[int]:
    """Token ids that are in every vocabulary; at least three of them."""
    digits = [number // _BASE**place % _BASE for place in range(_NUM_DIGITS)]
    return digits + [_BASE] * (num_tokens - _NUM_DIGITS)


def number_of_prompt(token_ids: Sequence[int]) -> int:
    """The number of a prompt of `numbered_prompt`."""
    return sum(digit * _BASE**place for place, digit in enumerate(token_ids[:_NUM_DIGITS]))
