from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from baton.bench.workload.passages import Vocabulary, draw_ids, exact, fitted, lengths_around
from tests.bench.workload.conftest import OPENING_ID


def random(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_lengths_are_uniform_between_both_bounds() -> None:
    counts = Counter(lengths_around(10, 0.25, 8000, 1, random()))
    assert sorted(counts) == list(range(7, 14))  # floor(7.5) to ceil(12.5)
    assert max(counts.values()) < 1.25 * min(counts.values())


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


def test_words_come_back_as_themselves_wherever_they_stand(words: Vocabulary) -> None:
    assert len(words.drawn_ids) >= 256
    for seed in range(20):
        ids = tuple(np.random.default_rng(seed).choice(words.drawn_ids, size=300).tolist())
        assert words.ids_of(words.text_of(ids)) == ids


@pytest.mark.parametrize("name", ["words", "opened", "pieces"])
def test_special_ids_are_never_drawn(name: str, request: pytest.FixtureRequest) -> None:
    vocabulary: Vocabulary = request.getfixturevalue(name)
    assert vocabulary.special_ids
    assert not vocabulary.special_ids & set(vocabulary.drawn_ids)
    assert all(0 <= token_id < vocabulary.size for token_id in vocabulary.drawn_ids)
    assert all(vocabulary.text_of([token_id]) for token_id in vocabulary.drawn_ids)


def test_a_vocabulary_without_many_words_draws_what_is_not_swallowed_at_once(pieces: Vocabulary) -> None:
    assert len(pieces.drawn_ids) > 10
    for token_id in pieces.drawn_ids:
        assert pieces.ids_of(pieces.text_of([token_id, token_id])) == (token_id, token_id)


def test_the_opening_is_what_a_text_gets_in_front(words: Vocabulary, opened: Vocabulary) -> None:
    assert words.opening_ids == ()
    assert opened.opening_ids == (OPENING_ID,)
    assert opened.ids_of("and then") == words.ids_of("and then")
