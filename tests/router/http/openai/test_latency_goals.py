"""A request may ask for goals of its own, by a field or a header, within what the operator allows."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest

from baton.router.http.openai.ignored import IgnoredFields
from baton.router.http.openai.latency_goals import asked_goals
from baton.router.http.openai.prompts import PromptMaker
from baton.router.routing.goals import AllowedGoals, Goals
from baton.wire.errors import InvalidRequest
from baton.wire.messages.legs import Decode
from baton.wire.messages.membership import DECODE
from tests.router.fake_node import answering
from tests.router.http_client import completion_body, fetch, post_chat
from tests.router.rig import DEFAULTS, serving

ALLOWED = AllowedGoals(Goals(0.5, 0.05), Goals(0.2, 0.05))
TTFT_HEADER = "x-baton-goal-ttft-ms"


@dataclass
class Asking:
    goal_ttft_ms: float | None = None
    goal_tpot_ms: float | None = None


def asked(
    request: Asking, headers: dict[str, str] | None = None, allowed: AllowedGoals | None = ALLOWED, strict: bool = False
) -> tuple[Goals | None, tuple[str, ...]]:
    notes = IgnoredFields(strict)
    return asked_goals(request, headers or {}, allowed, notes), notes.warnings


def test_a_request_without_goals_has_none_of_its_own() -> None:
    assert asked(Asking()) == (None, ())


def test_the_operators_goal_counts_for_what_a_request_does_not_ask_for() -> None:
    assert asked(Asking(goal_ttft_ms=2000.0)) == (Goals(2.0, 0.05), ())
    assert asked(Asking(goal_tpot_ms=80.0)) == (Goals(0.5, 0.08), ())


def test_a_header_says_the_same_and_a_field_counts_before_it() -> None:
    headers = {TTFT_HEADER: "1500", "x-baton-goal-tpot-ms": "90.5"}
    assert asked(Asking(), headers) == (Goals(1.5, 0.0905), ())
    assert asked(Asking(goal_ttft_ms=200.0), headers) == (Goals(0.2, 0.0905), ())


@pytest.mark.parametrize("request_", [Asking(goal_ttft_ms=199.0), Asking(goal_tpot_ms=49.0)])
def test_a_goal_tighter_than_the_operator_allows_is_refused(request_: Asking) -> None:
    with pytest.raises(InvalidRequest, match="must be at least") as caught:
        asked(request_)
    assert caught.value.param == ("goal_ttft_ms" if request_.goal_ttft_ms else "goal_tpot_ms")


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan", "inf", "1e9", "100ms", "\u0661"])
def test_a_header_that_is_no_number_of_milliseconds_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(Asking(), {TTFT_HEADER: text})
    assert caught.value.param == TTFT_HEADER


def test_a_goal_of_which_the_router_has_none_is_ignored_with_a_warning_or_refused_by_a_strict_one() -> None:
    no_tpot = AllowedGoals(Goals(0.5, 0.0), Goals(0.5, 0.0))
    warning = "goal_tpot_ms is ignored: this router has no such goal"
    assert asked(Asking(goal_tpot_ms=1.0), allowed=no_tpot) == (None, (warning,))
    assert asked(Asking(), {TTFT_HEADER: "5"}, None)[1] == ("goal_ttft_ms is ignored: this router has no such goal",)
    with pytest.raises(InvalidRequest) as caught:
        asked(Asking(goal_tpot_ms=1.0), allowed=None, strict=True)
    assert caught.value.code == "unsupported_parameter"


async def test_nodes_are_told_the_goal_of_a_request(prompts: PromptMaker) -> None:
    async with serving(prompts, replace(DEFAULTS, goals=ALLOWED.own)) as server:
        server.endpoints.goals = ALLOWED
        node = await server.rig.join(DECODE, answering([7], "length"))
        reply = await post_chat(server, goal_tpot_ms=75, goal_ttft_ms=300)
        assert (reply.status, "warnings" in reply.json()) == (200, False)
        assert (await node.expect(Decode)).params.goal_tpot_s == 0.075
        headers = {"content-type": "application/json", "x-baton-goal-tpot-ms": "20"}
        reply = await fetch(server, "POST", "/v1/completions", json.dumps(completion_body()).encode(), headers)
        assert (reply.status, reply.error["param"]) == (400, "x-baton-goal-tpot-ms")
