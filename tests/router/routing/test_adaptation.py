"""What goals were met is counted and shown, and preferences of mixed nodes follow it, slowly and one node at a time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from baton.router.http.openai.prompts import PromptMaker
from baton.router.nodes.registry import NodeRegistry
from baton.router.routing.adaptation import MIN_REQUESTS, Adaptation, MixedNode, RatioControl
from baton.router.routing.goals import Attainment, Goals, Window
from baton.wire.messages.legs import Decode
from baton.wire.messages.membership import DECODE, PREFILL
from baton.wire.step_cost import StepCost
from tests.router.fake_node import STATUS, answering, make_hello
from tests.router.http_client import post_chat
from tests.router.rig import DEFAULTS, serving

MODEL = "m"
HOURS = StepCost(1e3, 1e-6, 0.0, 1.0, 0.0)
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


def registry_of(*preferences: str) -> NodeRegistry:
    registry = NodeRegistry({MODEL: None})
    for each in preferences:
        assert registry.register(make_hello(DECODE, prefers=each), 0.0) is None
    return registry


def missed(attainment: Attainment) -> None:
    """A window full of first tokens that came too late."""
    for _ in range(20):
        attainment.first(9.0, None)
        attainment.ended(0.01, None)


@pytest.mark.parametrize(("adapts", "expected"), [(True, 2), (False, 1)])
def test_a_node_prefers_prompts_when_first_tokens_are_late_unless_all_is_frozen(adapts: bool, expected: int) -> None:
    registry = registry_of(PREFILL, DECODE, DECODE)
    attainment = Attainment(Goals(0.5, 0.05))
    adaptation = Adaptation(registry, {MODEL: attainment}, adapts=adapts)
    for _ in range(2):
        missed(attainment)
        adaptation.end_window()
    assert len(registry.available(PREFILL, MODEL)) == expected
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in adaptation.collect()
        for sample in family.samples
    }
    assert samples["baton:goal_requests_total", "m", "no", "ttft"] == 40
    reason = ("baton:preference_changes_total", "late_first_tokens", "m", "prefill")
    assert samples.get(reason, 0) == expected - 1


def test_plain_nodes_stay_what_they_are() -> None:
    registry = NodeRegistry({MODEL: None})
    for role in (PREFILL, DECODE, DECODE):
        registry.register(make_hello(role), 0.0)
    attainment = Attainment(Goals(0.5, 0.05))
    adaptation = Adaptation(registry, {MODEL: attainment}, adapts=True)
    for _ in range(4):
        missed(attainment)
        adaptation.end_window()
    assert len(registry.available(PREFILL, MODEL)) == 1


def test_a_refused_request_counts_as_one_that_missed() -> None:
    attainment = Attainment(Goals(0.5, 0.05))
    attainment.first(0.5, None)
    attainment.first(0.6, Goals(0.6, 0.0))
    attainment.ended(0.06, None)
    attainment.ended(99.0, Goals(0.5, 0.0))
    attainment.refused(is_slow=False)
    attainment.refused(is_slow=True)
    assert attainment.total == Window(3, 2, 3, 1)


@pytest.mark.parametrize("refuses", [True, False])
async def test_a_request_that_would_wait_too_long_is_refused_with_a_time_if_that_is_wanted(
    prompts: PromptMaker, refuses: bool
) -> None:
    settings = replace(DEFAULTS, goals=Goals(1500.0, 0.0), refuse_late=refuses)
    async with serving(prompts, settings) as server:
        status = replace(STATUS, cost=HOURS)  # 1,000 s for any prompt
        await server.rig.join(PREFILL, status=status)
        decode = await server.rig.join(DECODE, status=status)
        calls = [server.rig.call() for _ in range(2 if refuses else 3)]
        for _ in calls:
            await decode.expect(Decode)
        attainment = server.rig.relay.attainments["org/tiny"]
        assert attainment.num_late_refused == 0
        if refuses:
            reply = await post_chat(server)
            assert (reply.status, reply.error["code"]) == (503, "overloaded")
            assert 450 < int(reply.headers["retry-after"]) <= 500
            assert (attainment.num_late_refused, attainment.num_first) == (1, 0)
        for call in calls:
            await call.cancel()


async def test_what_the_router_answers_counts(prompts: PromptMaker) -> None:
    async with serving(prompts, replace(DEFAULTS, goals=Goals(1e-9, 60.0))) as server:
        await server.rig.join(DECODE, answering([7, 8], "length"))
        assert (await post_chat(server)).status == 200
        assert server.rig.relay.attainments["org/tiny"].total == Window(1, 0, 1, 1)


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
