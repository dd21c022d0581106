"""The tokens of rows, and whose they are."""

from __future__ import annotations

from baton.engine.runner.plain_rows import PlainRows, tokens_by_key
from baton.engine.scheduler.step import SampledToken
from tests.request_keys import A, B, C

ONE, TWO, THREE, FOUR = (SampledToken(token_id, None) for token_id in (1, 2, 3, 4))


def test_a_row_without_a_number_has_no_token() -> None:
    assert PlainRows([1, 2], [True, True]).tokens() == [ONE, TWO]
    assert PlainRows([1, 2], [False, True]).tokens() == [None, TWO]


def test_each_request_has_the_tokens_of_its_rows() -> None:
    assert tokens_by_key([], []) == {}
    assert tokens_by_key([A, B], [ONE, TWO]) == {A: (ONE,), B: (TWO,)}
    assert tokens_by_key([A, B, B, C], [ONE, TWO, THREE, FOUR]) == {A: (ONE,), B: (TWO, THREE), C: (FOUR,)}


def test_behind_a_row_without_a_number_a_request_has_no_tokens() -> None:
    assert tokens_by_key([A, B], [None, TWO]) == {B: (TWO,)}
    assert tokens_by_key([A, A, A, B], [ONE, None, THREE, FOUR]) == {A: (ONE,), B: (FOUR,)}
    assert tokens_by_key([A, A, B], [None, TWO, THREE]) == {B: (THREE,)}
