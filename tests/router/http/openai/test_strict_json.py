"""Whatever the bytes are: an object, or `InvalidRequest` with code invalid_json and nothing of the input in it."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.http.openai.strict_json import MAX_DEPTH, parse_object
from baton.wire.errors import InvalidRequest

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
