"""The order in which waiting requests are taken."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from baton.router.http.admission.fair_queue import QUANTUM, FairQueue


def _drain(queue: FairQueue[str]) -> list[str]:
    taken = []
    while queue:
        first = queue.first()
        assert queue.pop() == first
        taken.append(first)
    return taken


def test_one_line_is_taken_in_the_order_of_arrival() -> None:
    queue: FairQueue[str] = FairQueue()
    for name in "abc":
        queue.push("", name, 10, 0)
    assert (queue.num_requests, queue.num_tokens, len(queue)) == (3, 30, 3)
    assert _drain(queue) == ["a", "b", "c"]
    assert (queue.num_requests, queue.num_tokens) == (0, 0)
    with pytest.raises(IndexError):
        queue.pop()


def test_a_lower_priority_number_is_earlier_within_its_line() -> None:
    queue: FairQueue[str] = FairQueue()
    for name, priority in (("later", 5), ("first", 0), ("second", 0), ("sooner", -(2**40))):
        queue.push("alice", name, QUANTUM, priority)
    assert _drain(queue) == ["sooner", "first", "second", "later"]


def test_a_priority_does_not_help_against_other_keys() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(4):
        queue.push("alice", f"a{number}", QUANTUM, 0)
        queue.push("bob", f"b{number}", QUANTUM, -99)
    taken = _drain(queue)
    assert [name[0] for name in taken[:4]].count("a") == 2


def test_keys_get_the_same_tokens_whatever_the_size_of_their_requests() -> None:
    queue: FairQueue[str] = FairQueue()
    sizes = {"small": 10, "middle": 700, "large": 5 * QUANTUM}
    for line, size in sizes.items():
        for _ in range(60 * QUANTUM // size):
            queue.push(line, line, size, 0)
    tokens: Counter[str] = Counter()
    while sum(tokens.values()) < 90 * QUANTUM:
        line = queue.pop()
        tokens[line] += sizes[line]
    assert max(tokens.values()) - min(tokens.values()) <= 6 * QUANTUM


def test_one_key_with_many_requests_does_not_delay_another() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(1000):
        queue.push("flood", f"f{number}", 100, 0)
    assert [queue.pop() for _ in range(3)] == ["f0", "f1", "f2"]
    queue.push("guest", "g", 100, 0)
    assert "g" in [queue.pop() for _ in range(QUANTUM // 100 + 1)]


def test_a_huge_request_gets_its_turn() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("huge", "huge", 50 * QUANTUM, 0)
    for _ in range(200):
        queue.push("small", "small", QUANTUM, 0)
    assert 48 <= _drain(queue).index("huge") <= 51


def test_items_can_leave_from_any_place() -> None:
    queue: FairQueue[str] = FairQueue()
    names = ("a0", "a1", "a2", "b0", "b1", "b2")
    for name in names:
        queue.push(name[0], name, 5, 0)
    for name in (*names[1:2], *names[3:], *names[3:], "c0"):
        queue.remove(name[0], name)
    assert (queue.num_requests, queue.num_tokens, queue.tokens_ahead("a")) == (2, 10, 10)
    assert _drain(queue) == ["a0", "a2"]


def test_tokens_ahead_are_at_most_those_of_as_many_turns() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(10):
        queue.push("flood", "f", 100, 0)
    queue.push("guest", "g", 100, 0)
    assert queue.tokens_ahead("flood") == 1100
    assert queue.tokens_ahead("guest") == 200
    assert queue.tokens_ahead("new") == 0


def test_counts_hold_over_any_order_of_events() -> None:
    random_source = random.Random(3)
    queue: FairQueue[str] = FairQueue()
    waiting: dict[str, int] = {}
    for number in range(500):
        if random_source.random() < 0.55:
            name = f"{random_source.randrange(5)}-{number}"
            waiting[name] = random_source.randrange(1, 4 * QUANTUM)
            queue.push(name[0], name, waiting[name], random_source.randrange(3))
        elif waiting and random_source.random() < 0.5:
            waiting.pop(queue.pop())
        elif waiting:
            name = random_source.choice([*waiting])
            queue.remove(name[0], name)
            del waiting[name]
        assert (queue.num_requests, queue.num_tokens) == (len(waiting), sum(waiting.values()))
    assert sorted(_drain(queue)) == sorted(waiting)
