"""Drafts from a prediction: the place where the output stands in it is found again wherever the two differ."""

from __future__ import annotations

import random
from collections.abc import Sequence
from difflib import SequenceMatcher

import pytest

from baton.engine.speculation.text.prediction import Prediction


def num_right(prediction: Sequence[int], output: Sequence[int], at_once: int = 4) -> int:
    """How many tokens of the output came from drafts of at most `at_once`, as an engine takes them."""
    source, place, right = Prediction(prediction), 0, 0
    while place < len(output):
        draft = source.draft(at_once).token_ids if source.has_draft else ()
        pairs = zip(draft, output[place:], strict=False)
        count = next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(draft), len(output) - place))
        source.read(output[place : place + count + 1])
        place, right = place + count + 1, right + count
    return right


def test_an_output_that_is_its_prediction_comes_from_drafts_from_its_first_token_on() -> None:
    source = Prediction(range(10, 30))
    assert source.draft(3).token_ids == range(10, 13)
    assert num_right(range(20), list(range(20)), at_once=4) == 16  # each fifth is the model's own


@pytest.mark.parametrize(
    ("output", "draft"),
    [
        ((0, 1, 2, 99, 4), (5, 6, 7)),  # one replaced
        ((0, 1, 2, 98, 99, 5), (6, 7, 8)),  # two replaced
        ((0, 1, 2, 97, 98, 99, 3), (4, 5, 6)),  # three put in between
        ((0, 1, 2, 9, 10), (11, 12, 13)),  # some left out
        ((0, 1, 2, 98, 99, 40, 41), (42, 43, 44)),  # many left out
        ((0, 1, 2, 98, 3, 98, 4), (5, 6, 7)),
        ((7, 7, 0), (1, 2, 3)),  # some before it
        ((0, 1, 99), None),
        ((0, 1, 2, 98, 99, 80, 81), None),  # two tokens stand anywhere
        ((0, 1, 2, 98, 99, 80, 81, 82, 83), (84, 85, 86)),
        ((*range(60, 90), 99, 4, 5, 6, 7), (8, 9, 10)),  # back to what was left out
    ],
)
def test_the_place_is_found_again(output: tuple[int, ...], draft: tuple[int, ...] | None) -> None:
    source = Prediction(range(95))
    source.read(output)
    assert source.has_draft == (draft is not None)
    assert tuple(source.draft(3).token_ids) == (draft or ())


def test_the_nearest_of_several_places_counts() -> None:
    """As lines that end alike have it."""
    lines = [[1, 2, 3, number, 8, 9] for number in range(20, 40)]
    prediction = [token_id for line in lines for token_id in line]
    source = Prediction(prediction)
    source.read([*prediction[:22], 99, 8])  # in the fourth line one token is another
    assert list(source.draft(6).token_ids) == prediction[24 - 1 :][:6]


def test_it_says_how_sure_it_is() -> None:
    source = Prediction(range(40))
    first = source.draft(2).confidences
    source.read(range(20))
    assert first[0] < first[1] < source.draft(1).confidences[0] < 1.0
    source.read([99, 21])
    assert source.draft(1).confidences[0] == first[0]


def test_it_ends_where_the_prediction_ends() -> None:
    source = Prediction([1, 2, 3])
    source.read([1, 2])
    assert list(source.draft(9).token_ids) == [3]
    source.read_one(3)
    assert not source.has_draft
    assert not source.draft(9).token_ids
    source.read([4, 5, 6])
    assert not source.has_draft


def test_a_place_counts_only_where_a_token_begins() -> None:
    # bytes 00 00 00 01 00 00 00 hold a token 1 that is none
    source = Prediction([1 << 24, 0, 9, 1, 7])
    source.read_one(1)
    assert not source.has_draft
    source.read([6, 1])
    assert list(source.draft(9).token_ids) == [7]
    source = Prediction([1 << 24, 0, 0, 0, 0, 9, 20, 21, 22])
    source.read([20, 21, 99, 1, 0, 0, 0])  # four tokens are looked for everywhere
    assert not source.has_draft


def test_most_of_what_a_diff_finds_again_comes_from_drafts() -> None:
    chance = random.Random(5)
    for _ in range(60):
        prediction = [chance.randrange(30) for _ in range(300)]
        output = list(prediction)
        for _ in range(chance.randrange(1, 8)):
            place, count = chance.randrange(len(output)), chance.randrange(4)
            output[place : place + count] = [chance.randrange(30, 60) for _ in range(chance.randrange(4))]
        blocks = SequenceMatcher(None, prediction, output, autojunk=False).get_matching_blocks()
        kept = sum(block.size for block in blocks)
        assert num_right(prediction, output) > 0.8 * kept * 4 / 5 - 40
