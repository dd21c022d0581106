from __future__ import annotations

from baton.router.nodes.peer_rates import BYTES_PER_S, MAX_BYTES, MAX_MESSAGES, MESSAGES_PER_S, PeerRates


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
