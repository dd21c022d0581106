"""`python -m baton.bench.plan.decision_cost`: processor time that the router takes to choose the route of a request.

Nodes are half prefill, half decode, mixed, busy at random, and know their costs. A decision hashes the prompt, asks the
policies and, with goals, the placement.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from baton.router.nodes.registry import NodeRegistry
from baton.router.routing.ejection import Ejections
from baton.router.routing.goals import Goals
from baton.router.routing.placement import Placement
from baton.router.routing.policies import make_policy
from baton.router.routing.selection import Routing
from baton.router.routing.suspicion import Probation
from baton.wire.layout import KvLayout, LayerKv
from baton.wire.messages import DECODE, PREFILL, Hello, NodeStatus
from baton.wire.step_cost import StepCost

_COST = StepCost(1.5e-3, 2.4e-4, 1e-7, 2e-4, 4e-7)
_STATUS = NodeStatus(0, 0, 8000, 0, 192, 0.0, cost=_COST)
_MODEL = "plan"
_ROUNDS = 500


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m baton.bench.plan.decision_cost", description="Cost of a decision.")
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    options = parser.parse_args(arguments)
    cases = {"policies alone": None, "in time": Goals(10.0, 0.05), "nobody in time": Goals(1e-6, 0.05)}
    for name, goals in cases.items():
        used_us = 1e6 * decision_s(options.nodes, options.prompt_tokens, goals)
        sys.stdout.write(f"{name}: {used_us:.0f} us of processor time\n")
    return 0


def decision_s(num_nodes: int, num_tokens: int, goals: Goals | None) -> float:
    """Mean seconds of processor time of a decision."""
    chance, registry = random.Random(1), NodeRegistry({_MODEL: None})
    layout = KvLayout.of_layers("bfloat16", 16, [LayerKv(1, 16)])
    for number in range(num_nodes):
        prefers = DECODE if number % 2 else PREFILL
        hello = Hello(DECODE, f"n{number}", number + 1, "plan", layout, "a", "", 8192, 10**5, 64, _STATUS, "")
        registry.register(replace(hello, prefers=prefers), 0.0)
    for node in registry.all():
        node.num_legs = chance.randrange(1, 20)
        for _ in range(chance.randrange(1, 4)):
            node.prompts.add(chance.random(), 0.0)
    placement = None if goals is None else Placement(goals)
    policies = make_policy("prefix"), make_policy("prefix")
    routing = Routing(registry, *policies, 16, Probation(), Ejections(registry), placement)
    prompts = [tuple(chance.randrange(32_000) for _ in range(num_tokens)) for _ in range(_ROUNDS)]
    begun_s = time.process_time()
    for token_ids in prompts:
        routing.choose(_MODEL, token_ids, b"", frozenset(), 64, now_s=0.5, allows_handoff=True)
    return (time.process_time() - begun_s) / _ROUNDS


if __name__ == "__main__":
    raise SystemExit(main())
