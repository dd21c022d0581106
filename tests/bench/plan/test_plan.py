"""A plan is computed by the code that serves: every request gets its tokens, nothing is left over, and what comes out
is what arithmetic says."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from baton.bench.client.outcome import Outcome
from baton.bench.plan.command import main, read_cost
from baton.bench.plan.ratio import SHAPE as LARGE
from baton.bench.plan.ratio import Phase, shares
from baton.bench.plan.simulated_node import NodeShape, SimulatedNode
from baton.bench.plan.simulation import Deployment, PlannedRequest, Simulation
from baton.engine.scheduler.step_costs import StepCosts
from baton.router.routing.goals import Goals
from baton.wire.errors import InvalidSetting
from baton.wire.step_cost import StepCost

CORE = StepCost(1.5e-3, 2.4e-4, 1e-7, 2e-4, 4e-7)
SHAPE = NodeShape(CORE, 32, 512, 2048)
GOALS = Goals(0.25, 0.025)
BOUND = replace(SHAPE, goals=Goals(0.0, GOALS.tpot_s))
SPLIT = Deployment([SHAPE], [SHAPE], None)
ADAPTIVE = Deployment([SHAPE], [BOUND], GOALS)
BOTH = StepCost(*(0.55 * part for part in (1.5e-3, 2.4e-4, 1e-7, 2e-4, 4e-7)))
LENDER = replace(SHAPE, lent_cost=BOTH)
LENDING = Deployment([LENDER], [replace(LENDER, max_rest_s=0.02)], None)
METRICS = "\n".join(
    ["# TYPE baton:step_cost_seconds gauge"]
    + [
        f'baton:step_cost_seconds{{part="{part}"}} {value}'
        for part, value in (
            ("step", 1.5e-3),
            ("prompt_token", 2.4e-4),
            ("prompt_pair", 1e-7),
            ("decode", 2e-4),
            ("context_token", 4e-7),
        )
    ]
)


def load(num: int, gap_s: float, num_input: int = 512, num_output: int = 20) -> list[PlannedRequest]:
    return [PlannedRequest(number * gap_s, (number + 1,) * num_input, num_output) for number in range(num)]


def run(deployment: Deployment, requests: Sequence[PlannedRequest]) -> list[Outcome]:
    simulation = Simulation(deployment)
    outcomes = simulation.run(requests)
    simulation.check()
    for request, outcome in zip(requests, outcomes, strict=True):
        assert outcome.num_output_tokens == request.num_output_tokens
        assert outcome.chunk_s == sorted(outcome.chunk_s)
        assert outcome.chunk_s[0] > request.arrival_s
    return outcomes


def ttft_s(outcome: Outcome) -> float:
    return outcome.chunk_s[0] - outcome.sent_s


@pytest.mark.parametrize("deployment", [SPLIT, ADAPTIVE, Deployment([], [SHAPE], None)])
def test_a_request_alone_takes_what_its_steps_take(deployment: Deployment) -> None:
    (outcome,) = run(deployment, load(1, 0.0))
    assert ttft_s(outcome) == pytest.approx(CORE.prompt_s(512, 0, 512, 0, 0))
    second_s = CORE.without_prompt_s(1, 512)
    assert outcome.chunk_s[1] - outcome.chunk_s[0] == pytest.approx(second_s)


def lent_s(num_tokens: int, share: float) -> float:
    """What a prompt takes whose node has its partner's cores for that share of the time."""
    alone_s, with_both_s = (cost.prompt_s(num_tokens, 0, 512, 0, 0) for cost in (CORE, BOTH))
    return 1 / ((1 - share) / alone_s + share / with_both_s)


def test_a_prompt_has_the_cores_of_a_partner_that_has_nothing_to_do() -> None:
    (outcome,) = run(LENDING, load(1, 0.0, num_output=2))
    assert ttft_s(outcome) == pytest.approx(lent_s(512, 0.7))


def test_a_decode_node_rests_while_a_prompt_is_computed_on_its_cores() -> None:
    stream, prompt = run(LENDING, [*load(1, 0.0, num_output=200), PlannedRequest(0.15, (9,) * 512, 2)])
    gaps = [b - a for a, b in zip(stream.chunk_s[1:], stream.chunk_s[2:], strict=False)]
    step_s = CORE.without_prompt_s(1, 600)
    assert max(gaps) == pytest.approx(3 * step_s, rel=0.1)
    assert min(gaps) < 0.8 * step_s  # while its partner has nothing to do
    assert ttft_s(prompt) == pytest.approx(lent_s(512, 0.7 * 2 / 3))


def test_prompts_of_a_split_wait_for_the_one_prefill_node() -> None:
    prompt_s = CORE.prompt_s(512, 0, 512, 0, 0)
    outcomes = run(SPLIT, load(10, 0.0))
    assert ttft_s(outcomes[-1]) == pytest.approx(10 * prompt_s)


def test_with_goals_the_decode_node_helps_when_prompts_would_wait() -> None:
    requests = load(40, 0.1)
    late = [sum(ttft_s(outcome) > 0.5 for outcome in run(each, requests)) for each in (SPLIT, ADAPTIVE)]
    assert late[0] > 10
    assert late[1] == 0


def test_with_goals_and_little_to_do_streams_are_left_alone() -> None:
    gaps = [
        [max(b - a for a, b in zip(out.chunk_s, out.chunk_s[1:], strict=False)) for out in run(each, load(20, 0.4))]
        for each in (SPLIT, ADAPTIVE)
    ]
    assert gaps[0] == pytest.approx(gaps[1])


def test_gaps_between_tokens_keep_to_the_goal_when_the_decode_node_helps() -> None:
    outcomes = run(ADAPTIVE, load(60, 0.12, num_output=64))
    gaps = [b - a for out in outcomes for a, b in zip(out.chunk_s[1:], out.chunk_s[2:], strict=False)]
    assert sum(gap <= 1.2 * GOALS.tpot_s for gap in gaps) / len(gaps) > 0.99


@pytest.mark.parametrize("seed", range(6))
def test_any_load_ends_with_all_tokens_and_nothing_left_over(seed: int) -> None:
    chance = random.Random(seed)
    shape = replace(SHAPE, max_num_seqs=chance.choice((2, 8)), num_blocks=chance.choice((48, 400)))
    goals = chance.choice((None, Goals(0.0, 0.02), Goals(0.3, 0.0)))
    bound = replace(shape, goals=Goals(chance.choice((0.0, 0.3)), chance.choice((0.0, 0.005, 0.05))))
    deployment = Deployment([shape] * chance.randrange(3), [bound] * chance.randrange(1, 3), goals)
    at_s, requests = 0.0, []
    for number in range(60):
        at_s += chance.expovariate(20)
        shared = (5,) * chance.choice((0, 64))
        token_ids = shared + tuple(chance.randrange(1000) for _ in range(chance.randrange(1, 400)))
        requests.append(PlannedRequest(at_s, token_ids, chance.randrange(1, 40 + number)))
    run(deployment, requests)


def good(deployment: Deployment, requests: Sequence[PlannedRequest]) -> int:
    """Requests within the goals."""
    return within(deployment, requests, GOALS.ttft_s)


def within(deployment: Deployment, requests: Sequence[PlannedRequest], goal_ttft_s: float) -> int:
    """Requests within that goal for the first token, and that between tokens."""
    simulation = Simulation(deployment)
    outcomes = simulation.run(requests)
    simulation.check()
    good = [outcome for outcome in outcomes if outcome.failure is None and ttft_s(outcome) <= goal_ttft_s]
    return sum((each.chunk_s[-1] - each.chunk_s[0]) / (len(each.chunk_s) - 1) <= GOALS.tpot_s for each in good)


def test_in_overload_refusing_what_would_be_late_keeps_the_rest_in_time() -> None:
    mixed = replace(ADAPTIVE, prefills=[BOUND], is_mixed=True)
    refusing = replace(mixed, refuses_late=True)
    peak = good(refusing, load(120, 0.08)) / (120 * 0.08)
    overload = load(240, 0.04)
    assert good(refusing, overload) / (240 * 0.04) > 0.8 * peak
    assert good(mixed, overload) < good(refusing, overload) / 2


def test_in_overload_goals_that_are_missed_cost_no_first_token_its_time() -> None:
    goals = Goals(0.3, 0.012)
    one = Deployment([], [SHAPE], None)
    bounded = Deployment([], [replace(SHAPE, goals=goals)], goals)
    waits = []
    for deployment in (one, bounded, replace(bounded, decodes=[replace(SHAPE, goals=replace(goals, ttft_s=0.0))])):
        outcomes = run(deployment, load(40, 0.1, num_output=40))
        waits.append(statistics.median(ttft_s(outcome) for outcome in outcomes))
    assert waits[1] < 1.15 * waits[0]
    assert waits[2] > 1.3 * waits[0]


def test_in_overload_predictions_that_are_not_kept_are_mended_before_most_requests_are_late() -> None:
    unsteady = NodeShape(BOTH, 64, 512, 4096, Goals(0.0, GOALS.tpot_s), noise=0.18)
    refusing = Deployment([], [unsteady], Goals(0.5, GOALS.tpot_s), router_s=0.003, refuses_late=True)
    good = [within(refusing, load(200, gap_s, num_output=32), 0.5) / (200 * gap_s) for gap_s in (1 / 11, 1 / 22)]
    assert good[1] > 0.8 * good[0]


def test_preferences_that_follow_the_goals_gain_where_prompts_are_heavy_for_minutes() -> None:
    heavy = (Phase(70.0, 5.2, 4000, 8),)
    (frozen,), none = shares(1, heavy, adapts=False)
    (following,), num_changes = shares(1, heavy, adapts=True)
    assert (none, num_changes) == (0, 1)
    assert following > frozen + 0.15


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_wrong_cost_model_costs_time_and_nothing_else(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = StepCosts._fit

    def wrong(self: StepCosts) -> None:
        fit(self)
        assert self.cost is not None
        parts = (self.cost.step_s, self.cost.prompt_token_s, self.cost.prompt_pair_s)
        others = (self.cost.decode_s, self.cost.context_token_s)
        self.cost = StepCost(*(factor * part for part in (*parts, *others)))

    monkeypatch.setattr(StepCosts, "_fit", wrong)
    run(ADAPTIVE, load(40, 0.1))
    run(Deployment([BOUND] * 2, [BOUND] * 2, GOALS, is_mixed=True, adapts=True), load(40, 0.05))


@pytest.mark.parametrize("shape", [SHAPE, LARGE])
def test_a_node_has_learned_its_costs_before_the_load(monkeypatch: pytest.MonkeyPatch, shape: NodeShape) -> None:
    # a machine so busy that seconds pass between two lines: virtual time knows nothing of it
    monkeypatch.setattr("baton.engine.first_costs.time.perf_counter", map(float, count()).__next__)
    cost, true = SimulatedNode(shape).status.cost, shape.step_cost
    assert cost is not None
    assert cost.prompt_s(512, 0, 512, 0, 0) == pytest.approx(true.prompt_s(512, 0, 512, 0, 0), rel=0.01)
    assert cost.without_prompt_s(8, 0) == pytest.approx(true.without_prompt_s(8, 0), rel=0.05)


def test_the_command_prints_a_table_for_each_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "metrics"
    file.write_text(METRICS)
    flags = ["--prefill-cost", str(file), "--one-cost", str(file), "--num-prompts", "6", "--random-input-len", "64"]
    picture = tmp_path / "shares.svg"
    more = ["--random-output-len", "4", "--rates", "2,4", "--picture", str(picture)]
    assert main([*flags, *more]) == 0
    printed = capsys.readouterr().out
    assert printed.count("one node | split | split with goals | mixed | one with goals | refusing") == 3
    assert picture.read_text().startswith("<svg")
    assert "4 requests/s, 6 requests" in printed
    assert main([*flags, "--rates", "2", "--goodput", "ttft:0.001", "--lend-cores"]) == 0
    assert "0 %" in capsys.readouterr().out.split("share of good requests")[0]


def test_metrics_without_costs_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "metrics"
    file.write_text(METRICS)
    assert read_cost(str(file)) == CORE
    file.write_text("# nothing\n")
    with pytest.raises(InvalidSetting, match="no baton:step_cost_seconds"):
        read_cost(str(file))
    with pytest.raises(InvalidSetting):
        main(["--prefill-cost", ""])
    file.write_text(METRICS)
    with pytest.raises(InvalidSetting, match="--lend-cores needs --one-cost"):
        main(["--prefill-cost", str(file), "--lend-cores"])
