"""`python -m baton.bench.plan.ratio`: what it gains that preferences of mixed nodes follow the goals, on simulated
nodes.

Four mixed nodes, each with a device whose steps cost much even when they are small, as those of a large model do; a
load of long prompts for some minutes, then one of long answers. A node that generates takes a prompt in small chunks,
each of which pays for a step: so it computes far fewer tokens than one without streams, and how many nodes are left
without streams decides how many prompts there can be. Placement of single prompts alone uses all nodes, and cannot
change that.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.bench.client.outcome import Outcome
from baton.bench.plan.simulated_node import NodeShape
from baton.bench.plan.simulation import Deployment, PlannedRequest, Simulation
from baton.router.routing.goals import Goals
from baton.wire.step_cost import StepCost

GOALS = Goals(2.0, 0.075)
SHAPE = NodeShape(StepCost(40e-3, 1e-4, 5e-9, 1.5e-4, 2.5e-8), 256, 8192, 20_000, Goals(0.0, GOALS.tpot_s))


@dataclass(frozen=True, slots=True)
class Phase:
    """Requests of one kind for so long."""

    seconds: float
    rate: float
    num_prompt_tokens: int
    num_output_tokens: int


PROMPTS, ANSWERS = Phase(240.0, 5.5, 4000, 32), Phase(120.0, 14.0, 100, 400)


def shares(num_prefill: int, phases: Sequence[Phase], *, adapts: bool) -> tuple[list[float], int]:
    """Of each phase the share of requests within both goals, and how often a preference changed. So many of the four
    nodes prefer prompts at first."""
    shapes = [SHAPE] * num_prefill, [SHAPE] * (4 - num_prefill)
    simulation = Simulation(Deployment(*shapes, GOALS, router_s=0.003, is_mixed=True, adapts=adapts))
    outcomes = iter(simulation.run([request for each in _loads(phases) for request in each]))
    simulation.check()
    found = []
    for load in _loads(phases):
        of_phase = [next(outcomes) for _ in load]
        found.append(sum(map(_is_good, of_phase)) / len(of_phase))
    return found, simulation.adaptation.num_changes


def _loads(phases: Sequence[Phase]) -> Iterator[list[PlannedRequest]]:
    chance, begin_s, number = random.Random(0), 0.0, 0
    for phase in phases:
        at_s, load = begin_s, list[PlannedRequest]()
        while (at_s := at_s + chance.expovariate(phase.rate)) < begin_s + phase.seconds:
            number += 1
            load.append(PlannedRequest(at_s, (number,) * phase.num_prompt_tokens, phase.num_output_tokens))
        begin_s += phase.seconds
        yield load


def _is_good(outcome: Outcome) -> bool:
    first_s, last_s, num_gaps = outcome.chunk_s[0], outcome.chunk_s[-1], len(outcome.chunk_s) - 1
    return first_s - outcome.sent_s <= GOALS.ttft_s and last_s - first_s <= GOALS.tpot_s * num_gaps


def main() -> None:
    """Compute, and write a line for each start."""
    for num_prefill in (1, 2):
        for adapts in (False, True):
            (prompts, answers), num_changes = shares(num_prefill, (PROMPTS, ANSWERS), adapts=adapts)
            how = f"preferences follow ({num_changes} changes)" if adapts else "frozen"
            start = f"{num_prefill} of 4 nodes prefer prompts, {how}"
            sys.stdout.write(f"{start}: {prompts:.0%} of the prompts and {answers:.0%} of the answers are good\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
