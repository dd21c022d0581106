from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from baton.wire.errors import InvalidRequest
from baton.wire.grammar import Grammar
from baton.wire.sampling import MAX_PREDICTION_TOKENS, DecodingParams, SamplingParams

ALLOWED: list[tuple[str, list[Any]]] = [
    ("temperature", [0, 0.0, 2.0, 5e-324]),
    ("top_k", [-1, 0, 1, 2**31 - 1]),
    ("top_p", [1e-9, 1.0, 1]),
    ("min_p", [0.0, 1.0]),
    ("repetition_penalty", [1e-9, 1e6]),
    ("presence_penalty", [-2.0, 2.0]),
    ("frequency_penalty", [-2.0, 2.0]),
    ("seed", [None, -(2**63), 2**63 - 1]),
    ("choice", [0, 2**16]),
    ("max_tokens", [None, 1, 2**31 - 1]),
    ("min_tokens", [0, 5]),
    ("stop_token_ids", [(), (0, 2**32 - 1), (1,) * 256]),
    ("logprobs", [None, 0, 20]),
    ("prompt_logprobs", [None, 0, 20]),
    ("allowed_token_ids", [(), (0, 2**32 - 1), (1,) * 4096]),
    ("bad_word_ids", [(), ((0,), (2**32 - 1, 1)), ((1,) * 64,) * 256]),
    ("prediction_ids", [(), (0, 2**32 - 1)]),
]
FORBIDDEN: list[tuple[str, list[Any]]] = [
    ("temperature", [-0.1, 2.1, math.nan, math.inf, True, "1", None]),
    ("top_k", [-2, 2**31, 1.0, True]),
    ("top_p", [0, 0.0, 1.1, -1, math.nan]),
    ("min_p", [-0.1, 1.1]),
    ("repetition_penalty", [0.0, -1.0, 1e7, math.inf]),
    ("presence_penalty", [-2.1, 2.1]),
    ("frequency_penalty", [-2.1, 2.1]),
    ("seed", [-(2**63) - 1, 2**63, 1.5, False]),
    ("choice", [-1, 2**16 + 1]),
    ("max_tokens", [0, -1, 2**31, 1.5, True]),
    ("min_tokens", [-1, None]),
    ("stop_token_ids", [(-1,), (2**32,), (True,), (1.0,), (1,) * 257]),
    ("logprobs", [-1, 21, True]),
    ("prompt_logprobs", [-1, 21, True]),
    ("allowed_token_ids", [(-1,), (2**32,), (1,) * 4097]),
]


@pytest.mark.parametrize(("name", "values"), ALLOWED)
def test_values_within_the_range_are_taken(name: str, values: list[Any]) -> None:
    for value in values:
        assert getattr(DecodingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "values"), FORBIDDEN)
def test_values_outside_the_range_name_their_parameter(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest, match=name) as caught:
            DecodingParams(**{name: value})
        assert caught.value.param == name


def test_min_tokens_above_max_tokens_is_refused() -> None:
    DecodingParams(min_tokens=3, max_tokens=3)
    with pytest.raises(InvalidRequest, match="min_tokens 4"):
        DecodingParams(min_tokens=4, max_tokens=3)


@pytest.mark.parametrize(
    ("ids", "values"),
    [((1,), ()), ((1,), (101.0,)), ((1,), (math.nan,)), ((-1,), (0.0,)), ((1,) * 1025, (0.0,) * 1025)],
)
def test_a_logit_bias_that_cannot_be_applied_is_refused(ids: tuple[int, ...], values: tuple[float, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        DecodingParams(logit_bias_ids=ids, logit_bias_values=values)
    assert caught.value.param == "logit_bias"


def test_ids_outside_the_vocabulary_are_refused() -> None:
    DecodingParams(stop_token_ids=(99,), logit_bias_ids=(99,), logit_bias_values=(1.0,)).check_vocabulary(100)
    with pytest.raises(InvalidRequest, match="100"):
        DecodingParams(stop_token_ids=(100,)).check_vocabulary(100)
    with pytest.raises(InvalidRequest, match="100"):
        DecodingParams(logit_bias_ids=(100,), logit_bias_values=(1.0,)).check_vocabulary(100)


def test_a_prediction_may_be_as_long_as_a_message_allows_and_need_not_be_of_the_vocabulary() -> None:
    DecodingParams(prediction_ids=(7,) * MAX_PREDICTION_TOKENS).check_vocabulary(5)
    with pytest.raises(InvalidRequest) as caught:
        DecodingParams(prediction_ids=(7,) * (MAX_PREDICTION_TOKENS + 1))
    assert caught.value.param == "prediction"


@pytest.mark.parametrize("ids", [(-1,), (2**32,), ("a",), (True,)])
def test_a_prediction_of_a_script_holds_token_ids(ids: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(prediction_ids=ids)
    assert caught.value.param == "prediction"


@pytest.mark.parametrize("words", [((),), ((-1,),), ((1,) * 65,), ((1,),) * 257])
def test_bad_words_that_cannot_be_matched_are_refused(words: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        DecodingParams(bad_word_ids=words)
    assert caught.value.param == "bad_words"


@pytest.mark.parametrize(
    ("param", "params"),
    [
        ("allowed_token_ids", DecodingParams(allowed_token_ids=(99, 100))),
        ("bad_words", DecodingParams(bad_word_ids=((1, 2), (1, 100)))),
    ],
)
def test_a_token_list_outside_the_vocabulary_is_refused(param: str, params: DecodingParams) -> None:
    params.check_vocabulary(101)
    with pytest.raises(InvalidRequest, match="100") as caught:
        params.check_vocabulary(100)
    assert caught.value.param == param


@pytest.mark.parametrize("stop", [("",), ("x" * 1025,), ("x",) * 17, (3,)])
def test_stop_strings_that_cannot_match_are_refused(stop: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(stop=stop)
    assert caught.value.param == "stop"


def test_nodes_see_everything_of_the_users_parameters_but_the_text() -> None:
    user = SamplingParams(temperature=0.3, top_k=4, seed=5, stop=("end",))
    node = user.decoding()
    assert type(node) is DecodingParams
    assert all(getattr(node, field.name) == getattr(user, field.name) for field in fields(DecodingParams))


ASKS_MORE: dict[str, Any] = {
    "temperature": 0.5,
    "logprobs": 0,
    "min_tokens": 1,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "bad_word_ids": ((3,),),
    "allowed_token_ids": (1, 2),
    "grammar": Grammar("regex", "a+"),
}


@pytest.mark.parametrize("name", ASKS_MORE)
def test_greedy_rows_that_ask_for_more_than_the_largest_logit_say_so(name: str) -> None:
    assert not DecodingParams(**{"temperature": 0.0, name: ASKS_MORE[name]}).takes_largest


def test_what_a_greedy_row_takes_is_the_largest_logit_whatever_would_cut_its_distribution() -> None:
    biased = DecodingParams(temperature=0.0, logit_bias_ids=(1,), logit_bias_values=(2.0,))

    assert DecodingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.1, stop_token_ids=(1,)).takes_largest
    assert not biased.takes_largest
