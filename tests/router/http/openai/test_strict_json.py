"""Whatever the bytes are: an object, or `InvalidRequest` with code invalid_json and nothing of the input in it.

A body that would become too much is refused before anything of it is built."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.http.openai import strict_json
from baton.router.http.openai.strict_json import MAX_DEPTH, SLICE_BYTES, check_counts, parse_object
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
DAMAGED = {
    "not json": (b'{"a": ', None),
    "empty": (b"", None),
    "white space only": (b" \n\t", None),
    "byte order mark only": (b"\xef\xbb\xbf", None),
    "array on top": (b"[1]", None),
    "string on top": (b'"a"', None),
    "number on top": (b"1", None),
    "null on top": (b"null", None),
    "invalid utf-8": (b'{"a": "\xff"}', None),
    "utf-16": ('{"a": 1}'.encode("utf-16"), None),
    "surrogate in utf-8": (b'{"a": "\xed\xa0\x80"}', None),
    "duplicate key": (b'{"a": 1, "a": 2}', "a"),
    "duplicate key inside": (b'{"a": [{"b": 1, "b": 1}]}', "b"),
    "NaN": (b'{"a": NaN}', "a"),
    "Infinity": (b'{"a": {"b": Infinity}}', "a.b"),
    "-Infinity": (b'{"a": [1, -Infinity]}', "a[1]"),
    "1e999": (b'{"a": 1e999}', "a"),
    "5000 digits": (b'{"a": ' + b"9" * 5000 + b"}", None),
    "10**400": (b'{"a": 1' + b"0" * 400 + b"}", "a"),
    "2**64 in a list": (b'{"a": [1, 18446744073709551616]}', "a"),
    "lone surrogate": (b'{"a": [{"b": "x\\ud800"}]}', "a[0].b"),
    "lone surrogate in a key": (b'{"\\ud800": 1}', "?"),
    "deep lists": (b'{"a": ' + b"[" * 100_000, None),
    "deep objects": (b'{"a": ' * 100_000, None),
    "control character in a string": (b'{"a": "\x00"}', None),
    "trailing comma": (b'{"a": 1,}', None),
    "two values": (b"{} {}", None),
}


@pytest.mark.parametrize(("body", "param"), DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_body_is_refused(body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_object(body)
    assert caught.value.code == "invalid_json"
    assert caught.value.param == param
    assert len(caught.value.message) < 200
    (caught.value.message + str(caught.value.param)).encode()


def test_byte_order_mark_and_escaped_control_characters_are_accepted() -> None:
    assert parse_object(b'\xef\xbb\xbf{"a": "\\u0000\\u0007", "b": "\\ud83d\\ude00"}') == {"a": "\0\a", "b": "😀"}


@pytest.mark.parametrize(("levels", "is_accepted"), [(MAX_DEPTH - 1, True), (MAX_DEPTH, False)])
def test_nesting_is_limited_exactly(levels: int, is_accepted: bool) -> None:
    body = b'{"a": ' + b"[" * levels + b"]" * levels + b"}"
    if is_accepted:
        assert parse_object(body)["a"] is not None
    else:
        with pytest.raises(InvalidRequest, match="nested"):
            parse_object(body)


def test_a_secret_in_a_broken_body_is_not_echoed() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_object(b'{"key": canary-5b1f}')
    assert "canary" not in caught.value.message


def test_cost_is_linear_in_the_body() -> None:
    body = json.dumps({"a": {"b" * 60 + str(i): "x" for i in range(20_000)}, "c": list(range(200_000))}).encode()
    start = time.process_time()
    parse_object(body)
    assert time.process_time() - start < 2.0


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_an_object_or_the_one_error(body: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        assert isinstance(parse_object(body), dict)


_texts = st.text(st.sampled_from('ab"\\/\0\n\u00e9\u2028\ufeff😀'), max_size=5)
_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_texts, inner, max_size=4),
    max_leaves=20,
)


@settings(deadline=None)
@given(st.dictionaries(_texts, _json, max_size=4))
def test_every_sound_object_comes_through_unchanged(value: dict[str, object]) -> None:
    assert parse_object(json.dumps(value).encode()) == value


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
    check = strict_json._check_count

    def look(number: int, limit: int, what: str) -> None:
        looks.append(number)
        check(number, limit, what)

    monkeypatch.setattr(strict_json, "_check_count", look)
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
        patch.setattr(strict_json, "SLICE_BYTES", size)
        patch.setattr(strict_json, "MAX_JSON_TEXTS", number)
        check_counts(body)
        patch.setattr(strict_json, "MAX_JSON_TEXTS", number - 1)
        with pytest.raises(InvalidRequest):
            check_counts(body)
