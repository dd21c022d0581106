"""Texts in automata, against a plain search through them."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence

import pytest

from baton.engine.native.texts import BatonGuess, TextReader, Texts
from tests.engine.native import test_library
from tests.engine.native.compiled import library, needs_kernels

pytestmark = needs_kernels


def texts_of(max_tokens: int = 1 << 20, **bounds: int) -> Texts:
    return Texts(library(), max_tokens, **bounds)


def reader_of(token_ids: Sequence[int]) -> TextReader:
    return read_by(TextReader(texts_of()), token_ids)


def read_by(reader: TextReader, token_ids: Sequence[int]) -> TextReader:
    reader.read(token_ids)
    return reader


def places(part: Sequence[int], text: Sequence[int]) -> list[int]:
    """Behind each occurrence of `part`."""
    ends = range(len(part), len(text) + 1)
    return [end for end in ends if list(text[end - len(part) : end]) == list(part)]


def longest_before(text: Sequence[int], others: Sequence[Sequence[int]]) -> int:
    """How many of the last tokens of `text` are in it before its end, or in others."""
    for length in range(len(text), 0, -1):
        part = text[-length:]
        if len(places(part, text)) > 1 or any(places(part, other) for other in others):
            return length
    return 0


def followers(part: Sequence[int], texts: Sequence[Sequence[int]]) -> Counter[int]:
    return Counter(text[place] for text in texts for place in places(part, text) if place < len(text))


@pytest.mark.parametrize("num_texts", [1, 3])
def test_the_longest_end_that_was_there_before_is_known_after_each_token(num_texts: int) -> None:
    chance = random.Random(num_texts)
    for _ in range(120):
        alphabet, texts = chance.choice((1, 2, 3, 9)), texts_of()
        readers = [TextReader(texts) for _ in range(num_texts)]
        said: list[list[int]] = [[] for _ in readers]
        followed = [0] * num_texts  # what others say later makes a match no longer
        for _ in range(chance.randrange(1, 40)):
            number = chance.randrange(num_texts)
            said[number].append(chance.randrange(alphabet))
            readers[number].read_one(said[number][-1])
            others = [text for other, text in enumerate(said) if other != number]
            followed[number] = min(followed[number] + 1, longest_before(said[number], others))
            assert readers[number].first.match == followed[number]
        assert texts.num_tokens == sum(map(len, said))


def test_a_match_stays_as_long_as_it_is_when_another_text_divides_its_state() -> None:
    texts = texts_of()
    TextReader(texts).read([26, 1, 2, 3])
    reader = read_by(TextReader(texts), [2])
    TextReader(texts).read([25, 1, 2, 4])  # "1 2" and "2" are in more places now than "26 1 2"
    reader.read_one(4)
    assert reader.first.match == 2


def test_guesses_are_what_followed_most_often() -> None:
    chance = random.Random(4)
    for _ in range(150):
        texts = texts_of()
        said = [[chance.randrange(3) for _ in range(chance.randrange(1, 30))] for _ in range(chance.randrange(1, 4))]
        *_, reader = [read_by(TextReader(texts), text) for text in said]
        text = said[-1]
        guesses = reader.guesses(8)
        assert (len(guesses) > 0) == (longest_before(text, said[:-1]) > 0)
        told = list(text)
        for guess in guesses:
            seen = followers(told[len(told) - guess.match :], said)
            assert (guess.count, guess.total) == (seen[guess.token], seen.total())
            assert guess.count == max(seen.values())
            told.append(guess.token)
        first = reader.first
        assert not guesses or first.count == 0 or (first.token, first.total) == (guesses[0].token, guesses[0].total)


def test_of_several_that_followed_as_often_the_newest_is_guessed() -> None:
    assert [guess.token for guess in reader_of([1, 2, 7, 1, 2, 8, 3, 1, 2]).guesses(2)] == [8, 3]
    assert [guess.token for guess in reader_of([1, 2, 7, 4, 1, 2, 7, 5, 1, 2, 8, 3, 1, 2]).guesses(2)] == [7, 5]


def test_behind_the_end_of_all_texts_a_shorter_end_is_followed() -> None:
    """So a repetition goes on without an end."""
    guesses = reader_of([1, 2, 1, 2, 1, 2]).guesses(9)
    assert [guess.token for guess in guesses] == [1, 2] * 4 + [1]
    assert [guess.match for guess in guesses[:4]] == [4, 5, 4, 5]


def test_texts_that_are_as_long_as_prompts_get() -> None:
    chance = random.Random(1)
    text = [chance.randrange(50000) for _ in range(20000)]
    reader = reader_of([*text, 99999, *text[5000:5100]])
    assert reader.first.match == 100
    assert [guess.token for guess in reader.guesses(64)] == text[5100:5164]
    repeated = reader_of([5] * 20000)
    assert (repeated.first.match, repeated.first.token) == (19999, 5)


def test_memory_that_is_there_from_the_beginning_changes_nothing() -> None:
    chance = random.Random(2)
    text = [chance.randrange(40) for _ in range(3000)]
    readers = [TextReader(texts_of(num_expected=count)) for count in (0, 100, 3000)]
    for reader in readers:
        reader.read(text)
    first, *others = [[(each.token, each.match, each.count) for each in reader.guesses(64)] for reader in readers]
    assert first
    assert others == [first, first]


def test_the_oldest_tokens_go_first_and_memory_has_a_bound() -> None:
    texts = texts_of(max_tokens=50)
    reader = TextReader(texts)
    for start in range(0, 300, 10):
        reader.read(range(start, start + 10))
        assert texts.num_tokens <= 100
    for start, is_there in ((290, True), (251, True), (240, False), (0, False)):
        other = TextReader(texts)
        other.read(range(start, start + 4))
        assert (other.first.match == 4) == is_there


def test_the_oldest_texts_go_first_however_short_they_are() -> None:
    texts = texts_of(max_texts=3)
    for number in range(10):
        TextReader(texts).read([number, 100 + number])
    other = TextReader(texts)
    matches = []
    for number in range(10):
        other.read([number, 100 + number])
        matches.append(other.first.match)
    assert matches == [0] * 6 + [2] * 4


def test_what_becomes_older_is_followed_on() -> None:
    texts = texts_of(max_tokens=20)
    TextReader(texts).read(range(12))
    reader = TextReader(texts)
    for token_id in range(9):
        reader.read_one(token_id)
        assert reader.first.match == token_id + 1
    assert texts.num_tokens == 21  # the ninth began a new half
    assert [guess.token for guess in reader.guesses(9)] == [9, 10, 11]


def test_what_has_gone_is_followed_no_more() -> None:
    texts = texts_of(max_tokens=7)
    TextReader(texts).read([1, 2, 3, 4])
    reader = read_by(TextReader(texts), [1, 2, 3])
    for _ in range(3):
        TextReader(texts).read([1, 2, 3, 4])
    assert not reader.guesses(9)
    reader.read_one(4)
    assert reader.first.match == 1


def test_texts_of_any_age_match_no_more_than_was_said_and_no_less_than_is_kept() -> None:
    chance = random.Random(8)
    for _ in range(40):
        texts = texts_of(max_tokens=chance.randrange(1, 12), max_texts=chance.randrange(1, 4))
        said: list[list[int]] = [[], [], []]
        readers = [TextReader(texts) for _ in said]
        for _ in range(60):
            number = chance.randrange(3)
            said[number].append(chance.randrange(3))
            readers[number].read_one(said[number][-1])
            others = [text for other, text in enumerate(said) if other != number]
            assert readers[number].first.match <= longest_before(said[number], others)
            assert len(readers[number].guesses(5)) <= 5


def test_a_reader_keeps_its_texts() -> None:
    reader = reader_of([3, 4, 3])
    assert [guess.token for guess in reader.guesses(1)] == [4]


def test_a_guess_is_declared_as_the_library_declares_it() -> None:
    text = (test_library.SOURCE / "texts.h").read_text()
    found = re.search(r"struct BatonGuess \{\s*int32_t ([\w, ]+);\s*\};", text)
    assert found is not None
    assert [field[0] for field in BatonGuess._fields_] == found[1].split(", ")
