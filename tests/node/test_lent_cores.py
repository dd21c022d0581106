from __future__ import annotations

from dataclasses import dataclass

import pytest

from baton.node.lent_cores import LentCores


@dataclass
class Loans:
    wanted: bool

    def give(self, for_s: float = -1.0) -> None:
        pass

    def take_back(self) -> None:
        pass

    def is_wanted(self, within_s: float) -> bool:
        return self.wanted


def test_a_node_rests_twice_as_long_as_its_step_took_while_another_wants_its_cores() -> None:
    assert LentCores(Loans(wanted=True), 0.02).rest_s(0.008) == 0.016
    assert LentCores(Loans(wanted=True), 0.02).rest_s(1.0) == 0.02
    assert LentCores(Loans(wanted=True), 0.0).rest_s(0.008) == 0.0
    assert LentCores(Loans(wanted=False), 0.02).rest_s(0.008) == 0.0
    assert LentCores(None, 0.02).rest_s(0.008) == 0.0


@pytest.mark.parametrize(("step_s", "rest_s"), [(0.003, 0.006), (0.008, 0.002), (0.010, 0.0), (0.020, 0.0)])
def test_a_goal_between_tokens_comes_before_rest(step_s: float, rest_s: float) -> None:
    assert LentCores(Loans(wanted=True), 0.02, goal_tpot_s=0.010).rest_s(step_s) == pytest.approx(rest_s)
