"""Bytes of an HTTP body -> a JSON object that is safe to look at.

Owns the rules for the JSON text itself: UTF-8 (a byte order mark is skipped), one object at the top, no duplicate keys,
finite numbers below 2**64, at most 64 levels deep, strings that can be written out again (no lone surrogates), no more
in it than one body may hold. Does not know any field. Invariants: whatever the bytes are, the only error is
`InvalidRequest`, and its text never carries more of the input than a short repr. Costs are linear in the length of the
body. No step but those of one string takes longer than a few milliseconds, so a thread that does this lets others run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from baton.router.http.openai.long_json import parse_long
from baton.router.http.serving.limits import MAX_JSON_TEXTS, MAX_JSON_VALUES
from baton.wire.errors import InvalidRequest

SLICE_BYTES = 2**15
"""Of a text whose members are counted before anything of it is built."""
MAX_DEPTH = 64
MAX_INTEGER = 2**64
_MAX_SHOWN = 64
_MAX_AT_ONCE = 2**14
"""Characters of a text, or items of a list, that one call of the interpreter may take."""


def parse_object(body: bytes) -> dict[str, Any]:
    """The object in `body`. Raises `InvalidRequest`, code `invalid_json`, `param` set where a value is at fault."""
    if not body.strip():
        raise _invalid("the request body is empty")
    check_counts(body)
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _invalid(f"the request body is not valid UTF-8 at byte {error.start}") from None
    try:
        value = _parse(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise _invalid(f"the request body is not valid JSON: {error.msg} ({place})") from None
    except RecursionError:
        raise _invalid(f"the request body is nested more than {MAX_DEPTH} levels deep") from None
    except ValueError:  # what int() raises beyond the interpreter's limit of digits
        raise _invalid("the request body contains an integer that is too large") from None
    if not isinstance(value, dict):
        raise _invalid("the request body must be a JSON object")
    _check(value, "", 1)
    return value


def check_counts(body: bytes) -> int:
    """Count what a JSON text would become, before anything of it is built: a few bytes of text can become a hundred of
    memory. Returns how many slices were looked at. Raises `InvalidRequest` at the slice that goes beyond the limits.

    Nothing is held for a member before it is known to be allowed. What stands before the first fault of a text is
    counted right, and nothing is built of what stands behind it.
    """
    if len(body) <= MAX_JSON_TEXTS:  # each costs a byte at least
        return 0
    num_quotes = num_opened = num_commas = num_slices = 0
    is_inside, carried = False, b""
    for start in range(0, len(body), SLICE_BYTES):
        piece = carried + body[start : start + SLICE_BYTES]
        whole = piece.rstrip(b"\\")
        carried = b"\\" * ((len(piece) - len(whole)) % 2)  # it says of what comes next that it is escaped
        parts = whole.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[is_inside::2])
        num_quotes += len(parts) - 1
        is_inside = num_quotes % 2 == 1
        num_opened += outside.count(b"[") + outside.count(b"{")
        num_commas += outside.count(b",")
        num_slices += 1
        _check_count(num_quotes // 2 + num_opened, MAX_JSON_TEXTS, "names, strings, lists and objects")
        _check_count(num_commas + 1, MAX_JSON_VALUES, "values")
    return num_slices


def shown(value: object) -> str:
    """A short repr that is safe in a message: control characters and lone surrogates are escaped."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    # cut before repr: the repr of ten megabytes is ten megabytes
    text = repr(value[:_MAX_SHOWN]) if isinstance(value, str) else repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def member_path(path: str, key: str) -> str:
    """`path.key`, or `key` at the top; a long or unprintable key is cut and cleaned."""
    name = key[:_MAX_SHOWN].encode("utf-8", "replace").decode()
    return f"{path}.{name}" if path else name


def holds_only_integers(items: list[Any]) -> bool:
    """Whether `items` are integers, and no booleans."""
    starts = range(0, len(items), _MAX_AT_ONCE)
    return all(set(map(type, items[start : start + _MAX_AT_ONCE])) == {int} for start in starts)


def extremes(numbers: Sequence[int]) -> tuple[int, int]:
    """The smallest and the largest of `numbers`, of which there is one at least."""
    parts = [numbers[start : start + _MAX_AT_ONCE] for start in range(0, len(numbers), _MAX_AT_ONCE)]
    return min(map(min, parts)), max(map(max, parts))


def _parse(text: str) -> Any:
    if len(text) <= _MAX_AT_ONCE:
        return json.loads(text, object_pairs_hook=_object_without_duplicates)
    return parse_long(text, _object_without_duplicates)


def _invalid(message: str, param: str | None = None) -> InvalidRequest:
    return InvalidRequest(message, param, "invalid_json")


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _invalid(f"the key {shown(key)} appears twice in one object", member_path("", key))
            seen.add(key)
    return members


def _check(value: Any, path: str, depth: int) -> None:
    if isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, dict | list):
        if depth > MAX_DEPTH:
            raise _invalid(f"the request body is nested more than {MAX_DEPTH} levels deep", path[:_MAX_SHOWN])
        if isinstance(value, dict):
            for key, member in value.items():
                member_name = member_path(path, key)
                _check_text(key, member_name)
                _check(member, member_name, depth + 1)
        else:
            _check_items(value, path, depth)
    elif isinstance(value, float | int):
        _check_number(value, path)


def _check_items(items: list[Any], path: str, depth: int) -> None:
    if items and holds_only_integers(items):  # prompts of a hundred thousand token ids are common
        for number in extremes(items):
            _check_number(number, path)
        return
    for index, item in enumerate(items):
        _check(item, f"{path}[{index}]", depth + 1)


def _check_number(value: float | int, path: str) -> None:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _invalid(f"{path}: numbers must be finite", path)
    elif not -MAX_INTEGER < value < MAX_INTEGER:
        raise _invalid(f"{path}: the integer is too large", path)


def _check_text(text: str, path: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _invalid(f"{path}: character {error.start} is a lone surrogate, not text", path) from None


def _check_count(number: int, limit: int, what: str) -> None:
    if number > limit:
        raise InvalidRequest(f"the request body holds more than {limit:,} {what}", None, "invalid_json")
