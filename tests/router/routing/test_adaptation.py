"""What goals were met is counted and shown, and preferences of mixed nodes follow it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.router.http.openai.prompts import PromptMaker
from baton.router.nodes.registry import NodeRegistry
from baton.router.routing.adaptation import Adaptation
from baton.router.routing.attainment import Attainment
from baton.router.routing.goals import Goals
from baton.router.routing.ratio_control import Window
from baton.wire.messages import DECODE, PREFILL, Decode
from baton.wire.step_cost import StepCost
from tests.router.fake_node import STATUS, answering, make_hello
from tests.router.http_client import post_chat
from tests.router.rig import DEFAULTS, serving

MODEL = "m"
HOURS = StepCost(1e3, 1e-6, 0.0, 1.0, 0.0)


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
