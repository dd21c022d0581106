"""A node knows what prompts cost before the first request, and takes no long step to find out."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.engine.build import build_engine
from baton.engine.first_costs import measure_first_costs
from baton.engine.runner.base import RunningStep
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.step import Step
from baton.engine.scheduler.step_costs import StepCosts, work_of
from baton.engine.settings import EngineSettings
from baton.wire.step_cost import StepCost
from tests.checkpoints import make_checkpoint
from tests.computed_step import ComputedStep


class TimedRunner:
    """Notes the sizes of prompts; a step takes what `cost` says."""

    is_asynchronous = False

    def __init__(self, cost: StepCost) -> None:
        self.now_s = 0.0
        self.sizes: list[int] = []
        self.rows: list[int] = []
        self._cost = cost

    def launch(self, step: Step, layer_stored: object = None) -> RunningStep:
        work = work_of(step)
        self.now_s += self._cost.seconds(work)
        self.sizes.append(work.num_prompt_tokens)
        self.rows.append(work.num_decodes)
        return ComputedStep({})


def learn(
    monkeypatch: pytest.MonkeyPatch, cost: StepCost, *, learns_rows: bool = False
) -> tuple[StepCosts, TimedRunner]:
    runner = TimedRunner(cost)
    monkeypatch.setattr("baton.engine.first_costs.time.perf_counter", lambda: runner.now_s)
    costs = StepCosts(lambda: runner.now_s)
    costs.learns_rows = learns_rows
    measure_first_costs(runner, costs, SchedulerLimits(16, 64, 512, 1024))
    return costs, runner


def test_the_cost_of_prompts_is_known_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    true = StepCost(1e-4, 1e-5, 1e-9, 1e-5, 1e-9)
    costs, runner = learn(monkeypatch, true)
    assert max(runner.sizes) == 512
    assert costs.cost is not None
    assert costs.cost.prompt_s(2000, 0, 512, 0, 0) == pytest.approx(true.prompt_s(2000, 0, 512, 0, 0), rel=0.2)


def test_a_slow_model_is_not_kept_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, runner = learn(monkeypatch, StepCost(1e-2, 2e-3, 1e-7, 1e-3, 1e-7))
    assert max(runner.sizes) <= 32
    assert runner.now_s < 0.2
    assert costs.cost is not None


def test_learning_leaves_no_block_behind(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    engine = build_engine(EngineSettings(model=str(folder), num_blocks=32, num_threads=1), allocate_private)
    engine.learn_costs()
    status = engine.core.status()
    assert status.cost is not None
    assert (status.num_free_blocks, status.num_cached_blocks) == (32, 0)


def test_where_there_are_drafts_the_cost_of_rows_is_known_too(monkeypatch: pytest.MonkeyPatch) -> None:
    true = StepCost(4e-3, 1e-4, 1e-8, 2e-4, 1e-9)
    costs, runner = learn(monkeypatch, true, learns_rows=True)
    assert max(runner.rows) == 24
    assert costs.rows.seconds(16) == pytest.approx(4e-3 + 16 * 2e-4, rel=0.1)
    assert max(learn(monkeypatch, true)[1].rows) == 4
    slow = learn(monkeypatch, StepCost(0.5, 2e-3, 1e-7, 1e-3, 1e-7), learns_rows=True)
    assert max(slow[1].rows) == 1
