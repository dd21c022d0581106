"""A long text is parsed by short calls, with the values and the errors of `json.loads`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.router.http.openai.long_json import MAX_PIECE_CHARS, parse_long

_scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
)
_values = st.recursive(
    _scalars | st.lists(st.integers(), max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)
_damaged = st.text(st.sampled_from('[]{},:"\\ 01-.eEatrufls\n'), max_size=14)


@settings(deadline=None)
@given(_values, st.sampled_from([None, 0, 2]))
def test_the_values_are_those_of_the_standard_library(value: Any, indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    assert json.dumps(parse_long(text, dict)) == json.dumps(json.loads(text))


def _outcome(parse: Any, text: str) -> Any:
    try:
        return repr(parse(text))
    except json.JSONDecodeError as error:
        return type(error)


@settings(deadline=None, max_examples=500)
@given(_damaged)
@example("[1,]")
@example("[1,,2]")
@example("[,1]")
@example("[1 2,3]")
@example("[1,2")
@example("[01,2]")
@example("[-,2]")
@example('{"a":1,}')
@example('{"a" 1}')
@example("{1:2}")
@example("[1]2")
@example("")
def test_what_the_standard_library_refuses_is_refused(text: str) -> None:
    assert _outcome(lambda each: parse_long(each, dict), text) == _outcome(json.loads, text)


def test_no_call_takes_more_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    loads = json.loads

    def load(text: str) -> Any:
        lengths.append(len(text))
        return loads(text)

    monkeypatch.setattr(json, "loads", load)
    numbers = list(range(100_000))
    assert parse_long(json.dumps({"prompt": numbers}), dict) == {"prompt": numbers}
    assert max(lengths) <= MAX_PIECE_CHARS + 2
    assert len(lengths) > 30
