"""Counts what a JSON text would become, before anything of it is built.

Owns the limits of what one body may hold besides its bytes: a few bytes of text can become a hundred of memory. The
text is looked at in slices, so that nothing is held for a member before it is known to be allowed, and a text beyond
the limits is refused at the slice in which it goes beyond them. Does not check that the text is JSON: what stands
before the first fault of a text is counted right, and nothing is built of what stands behind it.
"""

from __future__ import annotations

from baton.router.http.serving.limits import MAX_JSON_TEXTS, MAX_JSON_VALUES
from baton.wire.errors import InvalidRequest

SLICE_BYTES = 2**15


def check_counts(body: bytes) -> int:
    """How many slices were looked at. Raises `InvalidRequest` for a body that holds too much."""
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
        _check(num_quotes // 2 + num_opened, MAX_JSON_TEXTS, "names, strings, lists and objects")
        _check(num_commas + 1, MAX_JSON_VALUES, "values")
    return num_slices


def _check(number: int, limit: int, what: str) -> None:
    if number > limit:
        raise InvalidRequest(f"the request body holds more than {limit:,} {what}", None, "invalid_json")
