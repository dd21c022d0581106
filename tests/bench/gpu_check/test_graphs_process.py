from __future__ import annotations

import math

import pytest

from bench.gpu_check.graphs_process import UNDECIDED, compare, lead, make_requests
from engine.scheduler.request import SampledToken
from wire.messages import TokenLogprobs


def drawn(token_id: int, logprob: float = -0.5, other: int = 9, other_logprob: float = -3.0) -> SampledToken:
    return SampledToken(token_id, TokenLogprobs(logprob, (token_id, other), (logprob, other_logprob)))


def test_the_batch_shrinks_one_by_one() -> None:
    lengths = [params.max_tokens for _, params in make_requests(12)]
    assert lengths == list(range(3, 15))
    assert all(params.ignore_eos and params.temperature == 0.0 for _, params in make_requests(12))


def test_equal_tokens_agree() -> None:
    found = compare([[drawn(1), drawn(2)]], [[drawn(1), drawn(2)]])
    assert (found.num_wrong, found.num_undecided) == (0, 0)


def test_another_token_is_wrong_where_the_model_was_decided() -> None:
    found = compare([[drawn(1), drawn(2)]], [[drawn(1), drawn(9)]])
    assert (found.num_wrong, found.num_undecided) == (1, 0)


def test_another_token_is_wrong_where_it_was_not_even_likely() -> None:
    close = drawn(2, -0.5, 9, -0.5 - UNDECIDED / 2)
    assert compare([[close]], [[drawn(8)]]).num_wrong == 1
    assert lead(close, 8) == math.inf


def test_rounding_may_decide_between_two_that_are_as_likely_and_the_rest_follows() -> None:
    close = drawn(2, -0.5, 9, -0.5 - UNDECIDED / 2)
    found = compare([[drawn(1), close, drawn(3)]], [[drawn(1), drawn(9), drawn(4)]])
    assert (found.num_wrong, found.num_undecided) == (0, 1)


def test_another_number_of_tokens_is_wrong() -> None:
    assert compare([[drawn(1), drawn(2)]], [[drawn(1)]]).num_wrong == 1


def test_requests_that_are_missing_are_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        compare([[drawn(1)], [drawn(1)]], [[drawn(1)]])
