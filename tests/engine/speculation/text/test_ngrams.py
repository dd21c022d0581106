"""Drafts from text: what came behind the last tokens where they were before."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from baton.engine.speculation.text.ngrams import NgramText


def proposed(token_ids: Sequence[int], shortest: int, longest: int, num_tokens: int = 3) -> list[int]:
    source = NgramText(shortest, longest)
    source.read(token_ids[:-1])
    source.read_one(token_ids[-1])
    found = source.draft(num_tokens)
    assert source.has_draft == bool(found.token_ids)
    assert len(found.confidences) == len(found.token_ids)
    return list(found.token_ids)


@pytest.mark.parametrize(
    ("token_ids", "lengths", "drafts"),
    [
        ((1, 2, 3, 4, 5, 1, 2), (2, 2), [3, 4, 5]),
        ((1, 2, 3, 9, 1, 2, 4, 8, 1, 2), (2, 2), [4, 8, 1]),  # the last place counts
        ((7, 2, 3, 9, 1, 2, 4, 8, 7, 2), (1, 2), [3, 9, 1]),  # the longest counts
        ((7, 2, 3, 9, 1, 2, 4, 8, 5, 2), (1, 2), [4, 8, 5]),
        ((7, 2, 3, 9, 1, 2, 4, 8, 5, 2), (2, 2), []),
        ((5, 5, 5, 5), (2, 2), [5]),
        ((5, 5), (1, 1), [5]),
        ((5, 5), (2, 4), []),
        ((5,), (1, 4), []),
        ((1, 2, 3), (1, 3), []),
    ],
)
def test_what_came_behind_the_last_tokens_comes_again(
    token_ids: Sequence[int], lengths: tuple[int, int], drafts: list[int]
) -> None:
    assert proposed(token_ids, *lengths) == drafts


def test_there_are_no_more_drafts_than_asked_for() -> None:
    text = (1, 2, 3, 4, 5, 1)
    assert [proposed(text, 1, 1, at_most) for at_most in (1, 3, 9)] == [[2], [2, 3, 4], [2, 3, 4, 5, 1]]


def test_a_place_counts_only_where_a_token_begins() -> None:
    # bytes 00 00 00 01 00 00 00 hold the token 2**24, four times, and none of them alone
    assert proposed((0, 1, 0, 3, 2**24), 1, 1) == []
    assert proposed((2**24, 9, 0, 1, 0, 3, 2**24), 1, 1) == [9, 0, 1]


def test_any_text_has_the_drafts_that_a_plain_search_finds() -> None:
    chance = random.Random(3)
    for _ in range(300):
        text = [chance.choice((0, 1, 256, 65536)) for _ in range(chance.randrange(1, 30))]
        length = chance.randrange(1, 4)
        places = [place for place in range(1, len(text) - length) if text[place : place + length] == text[-length:]]
        expected = text[places[-1] + length :][:3] if places and len(text) >= length else []
        if text[:length] != text[-length:]:
            assert proposed(text, length, length) == expected


def test_only_the_end_of_a_long_text_is_looked_through() -> None:
    assert proposed([1, 2, *range(10, 4104), 1], 1, 1) == []
    assert proposed([1, 2, *range(10, 4103), 1], 1, 1) == [2, 10, 11]
