"""Rubbish is counted by connection and minute, and so is how much each connection says."""

from __future__ import annotations

import logging

import pytest

from baton.router.nodes.bad_peers import (
    BYTES_PER_S,
    MAX_BAD_MESSAGES,
    MAX_BYTES,
    MAX_MESSAGES,
    MESSAGES_PER_S,
    PERIOD_S,
    BadPeers,
    PeerRates,
)

BAD = ValueError("bad")


def test_a_connection_is_cut_off_after_so_much_and_heard_again_in_the_next_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = [0.0]
    rubbish = BadPeers(lambda: now_s[0])
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


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_flood_of_messages_is_over_the_allowance_and_that_comes_back() -> None:
    clock = Clock()
    rates = PeerRates(clock)
    assert all(rates.allows(b"a", 100) for _ in range(int(MAX_MESSAGES)))
    assert not rates.allows(b"a", 100)
    assert rates.allows(b"b", 100)
    clock.now_s += 2 / MESSAGES_PER_S
    assert rates.allows(b"a", 100)


def test_bytes_count_too() -> None:
    clock = Clock()
    rates = PeerRates(clock)
    large = int(MAX_BYTES) // 32
    assert [rates.allows(b"a", large) for _ in range(33)] == [True] * 32 + [False]
    clock.now_s += 3 * large / BYTES_PER_S
    assert rates.allows(b"a", large)


def test_a_node_at_work_is_far_below_it() -> None:
    clock = Clock()
    rates = PeerRates(clock)
    for _ in range(20_000):  # a message for each step of 2 ms, with the tokens of 256 streams
        clock.now_s += 0.002
        assert rates.allows(b"node", 20_000)


def test_the_number_of_connections_is_bounded() -> None:
    rates = PeerRates(Clock())
    for number in range(10_000):
        rates.allows(number.to_bytes(4, "big"), 1)
    assert len(rates._by_peer) <= 4096
