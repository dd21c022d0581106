from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from baton.bench.workload.passages import Vocabulary, draw_ids, exact, fitted, lengths_around


def random(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_lengths_are_uniform_between_both_bounds() -> None:
    counts = Counter(lengths_around(10, 0.25, 8000, 1, random()))
    assert sorted(counts) == list(range(7, 14))  # floor(7.5) to ceil(12.5)
    assert max(counts.values()) < 1.25 * min(counts.values())


def test_whole_words_stay_as_they_were_drawn(words: Vocabulary) -> None:
    ids = draw_ids(words, 500, random())
    passage = fitted(words, ids, random())
    assert (passage.token_ids, passage.num_surplus) == (ids, 0)
    assert words.ids_of(passage.text) == ids


@pytest.mark.parametrize("seed", range(5))
def test_pieces_are_cut_and_filled_until_the_text_has_as_many_tokens(pieces: Vocabulary, seed: int) -> None:
    ids = draw_ids(pieces, 100, random(seed))
    passage = fitted(pieces, ids, random(seed))
    assert pieces.ids_of(pieces.text_of(ids)) != ids
    assert pieces.ids_of(passage.text) == passage.token_ids
    assert len(passage.token_ids) == 100 + passage.num_surplus
    assert passage.num_surplus == 0


def test_exact_ids_stay_and_what_their_text_differs_by_is_told(pieces: Vocabulary) -> None:
    ids = draw_ids(pieces, 100, random())
    passage = exact(pieces, ids)
    assert passage.token_ids == ids
    assert passage.num_surplus == len(pieces.ids_of(passage.text)) - 100 != 0
