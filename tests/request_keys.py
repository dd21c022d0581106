"""Request keys for tests that care about nothing but telling requests apart."""

from __future__ import annotations

from baton.wire.request_key import RequestKey


def key_of(name: str | int, attempt: int = 1) -> RequestKey:
    """The key of the request that a test calls by this name or number."""
    return RequestKey(str(name).encode().rjust(16, b"-"), attempt)


A, B, C = key_of("a"), key_of("b"), key_of("c")
