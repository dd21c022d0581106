"""Which nodes prefer what follows how many requests meet their goals, slowly and one node at a time."""

from __future__ import annotations

import random

from baton.router.routing.ratio_control import MIN_REQUESTS, MixedNode, RatioControl, Window
from baton.wire.messages import DECODE, PREFILL

GOOD = Window(100, 99, 100, 99)
LATE = Window(100, 50, 100, 99)
SLOW = Window(100, 99, 100, 50)
BOTH_MISSED = Window(100, 50, 100, 50)


class Nodes:
    """Nodes that do what they are told."""

    def __init__(self, *preferences: str) -> None:
        self.control = RatioControl()
        self.nodes = [MixedNode(epoch, each, 10 - epoch) for epoch, each in enumerate(preferences)]
        self.reasons: list[str] = []

    def see(self, *windows: Window) -> list[str]:
        """What they prefer after each of the windows."""
        found = []
        for window in windows:
            change = self.control.decide(window, self.nodes)
            if change is not None:
                self.reasons.append(change.reason)
                self.nodes[change.epoch] = self.nodes[change.epoch]._replace(preference=change.preference)
            found.append("".join(node.preference[0] for node in self.nodes))
        return found


def test_late_first_tokens_have_the_least_busy_decode_node_prefer_prompts() -> None:
    nodes = Nodes(PREFILL, DECODE, DECODE)
    assert nodes.see(LATE, LATE) == ["pdd", "pdp"]
    assert nodes.reasons == ["late_first_tokens"]


def test_slow_streams_have_a_prefill_node_prefer_to_generate() -> None:
    nodes = Nodes(PREFILL, PREFILL, DECODE)
    assert nodes.see(SLOW, SLOW) == ["ppd", "pdd"]
    assert nodes.reasons == ["slow_streams"]


def test_one_window_is_not_enough_and_neither_is_one_with_few_requests() -> None:
    few = Window(MIN_REQUESTS - 1, 0, 100, 100)
    assert set(Nodes(PREFILL, DECODE, DECODE).see(LATE, GOOD, LATE, few, LATE, GOOD)) == {"pdd"}


def test_when_both_goals_are_missed_nothing_is_changed() -> None:
    assert set(Nodes(PREFILL, DECODE, DECODE).see(*[BOTH_MISSED] * 9)) == {"pdd"}


def test_one_node_of_each_kind_is_left() -> None:
    assert set(Nodes(PREFILL, DECODE).see(*[LATE] * 9)) == {"pd"}
    assert Nodes(PREFILL, DECODE, DECODE, DECODE).see(*[LATE] * 12)[-1].count("d") == 1


def test_after_a_change_windows_pass_that_are_not_looked_at() -> None:
    nodes = Nodes(PREFILL, DECODE, DECODE, DECODE)
    assert [each.count("p") for each in nodes.see(*[LATE] * 6)] == [1, 2, 2, 2, 2, 3]


def test_taking_a_change_back_needs_more_windows() -> None:
    nodes = Nodes(PREFILL, DECODE, DECODE)
    nodes.see(LATE, LATE, GOOD, GOOD)
    assert nodes.see(*[SLOW] * 6)[4:] == ["pdp", "pdd"]


def test_goals_that_are_missed_by_chance_change_little() -> None:
    chance, nodes = random.Random(5), Nodes(*[PREFILL, DECODE] * 4)
    nodes.see(*(chance.choice((GOOD, GOOD, LATE, SLOW, BOTH_MISSED)) for _ in range(1000)))
    assert len(nodes.reasons) < 60
