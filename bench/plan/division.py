"""`python -m baton.bench.plan.division`: what a prompt could gain if two nodes divided it, on a simulated split with
goals.

For each request that is placed, the expected time to its first token with the best node alone stands against the best
over all places to cut the prompt, either node first, with a transfer that costs nothing. The second node needs the KV
of the head, so it begins when that is there.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.bench.plan.simulated_node import NodeShape
from baton.bench.plan.simulation import Deployment, PlannedRequest, Simulation
from baton.router.nodes.registry import Node
from baton.router.routing.goals import Goals
from baton.router.routing.placement import Placement
from baton.router.routing.route import Route
from baton.wire.step_cost import StepCost

_COST = StepCost(1.5e-3, 2.4e-4, 1e-7, 2e-4, 4e-7)
_GOALS = Goals(0.5, 0.05)
_CUT = 32


@dataclass(frozen=True, slots=True)
class _Noting(Placement):
    """Notes (alone, divided) of each prompt that it places."""

    noted: list[tuple[float, float]] = field(default_factory=list)

    def choose(
        self, route: Route, prefills: Sequence[Node], decodes: Sequence[Node], *args: Any, **kwargs: Any
    ) -> Route:
        num_tokens, now_s = args[0], args[2]
        nodes = [*prefills, *decodes]
        alone = min(each.prompts.wait_s(now_s) + _seconds(each, num_tokens, 0) for each in nodes)
        divided = min(
            max(one.prompts.wait_s(now_s) + _seconds(one, head, 0), other.prompts.wait_s(now_s))
            + _seconds(other, num_tokens - head, head)
            for one in nodes
            for other in nodes
            if one is not other
            for head in range(_CUT, num_tokens, _CUT)
        )
        self.noted.append((alone, min(alone, divided)))
        return Placement.choose(self, route, prefills, decodes, *args, **kwargs)


def _seconds(node: Node, num_tokens: int, start: int) -> float:
    num_decodes = node.num_decoding if node.role == "decode" else 0
    chunk = 512
    if num_decodes:
        left_s = _GOALS.tpot_s - _COST.without_prompt_s(num_decodes, node.num_held_tokens)
        chunk = max(16, min(chunk, _COST.chunk_within(left_s, start + num_tokens // 2)))
    return _COST.prompt_s(num_tokens, start, chunk, num_decodes, node.num_held_tokens)


def main() -> None:
    """Compute, and write a line for each rate."""
    for num_tokens, rate in ((512, 6.0), (512, 10.0), (2048, 1.5), (2048, 2.5)):
        chance, at_s, requests = random.Random(0), 0.0, []
        for _ in range(150):
            at_s += chance.expovariate(rate)
            requests.append(PlannedRequest(at_s, tuple(chance.randrange(32_000) for _ in range(num_tokens)), 64))
        sizes = 64, 512, 8192
        prefill, decode = NodeShape(_COST, *sizes), NodeShape(_COST, *sizes, Goals(0.0, _GOALS.tpot_s))
        placement = _Noting(_GOALS)
        Simulation(Deployment([prefill], [decode], _GOALS), placement).run(requests)
        alone, divided = (sum(each) for each in zip(*placement.noted, strict=True))
        gain = 1 - divided / alone
        sys.stdout.write(f"{num_tokens} tokens, {rate:g} requests/s: the first token {gain:.1%} sooner at most\n")


if __name__ == "__main__":
    main()
