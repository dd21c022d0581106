"""A body that would become too much is refused before anything of it is built."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.http.openai import json_count, strict_json
from baton.router.http.openai.json_count import SLICE_BYTES, check_counts
from baton.router.http.openai.strict_json import parse_object
from baton.router.http.serving.limits import MAX_JSON_TEXTS, MAX_JSON_VALUES
from baton.wire.errors import InvalidRequest

TOO_MANY = {
    "names": json.dumps({f"k{number}": 1 for number in range(MAX_JSON_TEXTS + 1)}).encode(),
    "one name again and again": b'{"k":1' + b',"k":1' * MAX_JSON_TEXTS + b"}",
    "strings": json.dumps({"stop": ["a"] * MAX_JSON_TEXTS}).encode(),
    "lists": json.dumps({"prompt": [[]] * MAX_JSON_TEXTS}).encode(),
    "objects": json.dumps({"messages": [{}] * MAX_JSON_TEXTS}).encode(),
    "levels": b'{"a":' + b"[" * MAX_JSON_TEXTS,
    "numbers": b'{"prompt":[1' + b",1" * MAX_JSON_VALUES + b"]}",
}


@pytest.fixture
def nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(_: str) -> Any:
        pytest.fail("a body was parsed that holds too much")

    monkeypatch.setattr(strict_json, "_parse", build)


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize("kind", TOO_MANY)
def test_too_much_is_refused_by_its_limit_before_anything_is_built(kind: str) -> None:
    limit = MAX_JSON_VALUES if kind == "numbers" else MAX_JSON_TEXTS
    with pytest.raises(InvalidRequest, match=f"{limit:,}") as caught:
        parse_object(TOO_MANY[kind])
    assert caught.value.code == "invalid_json"


def test_it_is_refused_where_it_goes_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    check = json_count._check

    def look(number: int, limit: int, what: str) -> None:
        looks.append(number)
        check(number, limit, what)

    monkeypatch.setattr(json_count, "_check", look)
    member = b'"k":1,'
    with pytest.raises(InvalidRequest):
        check_counts(b"{" + member * (100 * MAX_JSON_TEXTS))
    assert len(looks) // 2 <= len(member) * MAX_JSON_TEXTS // SLICE_BYTES + 2


@pytest.mark.parametrize(
    "members",
    [
        {"prompt": [7] * 2**20},
        {"prompt": [[7] * 2**13] * 128},
        {"prompt": 'a "word", [and] {brackets} \\' * 40_000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}] * 2048},
        {"logit_bias": {str(number): 1 for number in range(1024)}, "user": "u" * MAX_JSON_TEXTS},
    ],
    ids=["a million token ids", "prompts of token ids", "text", "messages", "logit bias"],
)
def test_what_requests_need_is_accepted(members: dict[str, Any]) -> None:
    assert parse_object(json.dumps(members).encode()) == members


_texts = st.text(st.sampled_from('"\\[]{},:a\n\u00e9'), max_size=12)
_values = st.recursive(
    _texts | st.integers(0, 99),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_texts, inner, max_size=4),
    max_leaves=30,
)


def _num_texts(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(_num_texts, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(_num_texts, value))
    return int(isinstance(value, str))


@settings(deadline=None)
@given(st.dictionaries(_texts, _values, max_size=4), st.integers(1, 9), st.booleans())
def test_every_text_is_counted_wherever_slices_are_cut(value: dict[str, Any], size: int, is_ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    number = _num_texts(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_count, "SLICE_BYTES", size)
        patch.setattr(json_count, "MAX_JSON_TEXTS", number)
        check_counts(body)
        patch.setattr(json_count, "MAX_JSON_TEXTS", number - 1)
        with pytest.raises(InvalidRequest):
            check_counts(body)
