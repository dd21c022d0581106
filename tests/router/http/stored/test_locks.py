"""Locks of conversations: one response at a time, of each owner, and none that is left behind."""

from __future__ import annotations

import pytest

from baton.router.http.stored.locks import Locks
from baton.wire.errors import InvalidRequest


def test_only_one_holds_a_conversation_but_for_the_stream_that_is_resumed() -> None:
    locks = Locks()
    with locks.held("alice", "conv", is_resumed=False):
        with pytest.raises(InvalidRequest, match="in the making"), locks.held("alice", "conv", is_resumed=False):
            pass
        with locks.held("alice", "conv", is_resumed=True), locks.held("bob", "conv", is_resumed=False):
            locks.check("alice", "other")
        with pytest.raises(InvalidRequest):
            locks.check("alice", "conv")
    locks.check("alice", "conv")


def test_one_that_fails_leaves_no_lock() -> None:
    locks = Locks()
    with pytest.raises(ValueError, match="boom"), locks.held("alice", "conv", is_resumed=False):
        raise ValueError("boom")
    locks.check("alice", "conv")
