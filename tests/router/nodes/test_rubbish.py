"""Rubbish is counted by connection and minute."""

from __future__ import annotations

import logging

import pytest

from baton.router.nodes.rubbish import MAX_BAD_MESSAGES, PERIOD_S, RubbishLog

BAD = ValueError("bad")


def test_a_connection_is_cut_off_after_so_much_and_heard_again_in_the_next_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = [0.0]
    rubbish = RubbishLog(lambda: now_s[0])
    with caplog.at_level(logging.WARNING):
        assert [rubbish.note(b"a", BAD) for _ in range(MAX_BAD_MESSAGES)] == [*[False] * (MAX_BAD_MESSAGES - 1), True]
        assert rubbish.is_cut_off(b"a")
        assert not rubbish.is_cut_off(b"b")
        assert not rubbish.note(b"b", BAD)
        now_s[0] = PERIOD_S
        assert not rubbish.is_cut_off(b"a")
        assert not rubbish.note(b"a", BAD)
    told = [record.getMessage() for record in caplog.records]
    assert [text.split()[0] for text in told] == ["1", str(MAX_BAD_MESSAGES + 1)]
    assert rubbish.num_bad == MAX_BAD_MESSAGES + 2
