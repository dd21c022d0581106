"""What computing a prompt is expected to take at a node, from the cost models that nodes tell.

Owns the formula for one prompt at one node: how long it waits for those before it, and how long it takes beside what
decodes there. Whoever compares nodes decides by it; nothing else depends on it, so a wrong prediction costs time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.router.nodes.registry import Node
from baton.wire.messages.membership import DECODE
from baton.wire.step_cost import PLANNED_SHARE, SMALLEST_CHUNK, StepCost

ALONE_CHUNK = 512
"""Tokens of a step in which nobody decodes: the usual budget of a step on a CPU; more would change little."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """As of `now_s`. `cost`: of nodes that do not know their own."""

    cost: StepCost
    now_s: float

    @classmethod
    def of(cls, nodes: Iterable[Node], now_s: float) -> Predictions | None:
        """None: none of these nodes has computed a prompt yet."""
        costs = (node.status.cost for node in nodes)
        cost = next((cost for cost in costs if cost is not None and cost.knows_prompts), None)
        return None if cost is None else cls(cost, now_s)

    def cost_of(self, node: Node) -> StepCost:
        """The costs of this node."""
        own = node.status.cost
        return self.cost if own is None else own.with_prompts_of(self.cost)

    def wait_s(self, node: Node) -> float:
        """How long a prompt waits for those before it, of this router and of others."""
        wait_s, num_tokens = node.prompts.wait_s(self.now_s), node.num_other_prompt_tokens
        if not num_tokens:
            return wait_s
        return wait_s + self.cost_of(node).prompt_s(num_tokens, 0, ALONE_CHUNK, 0, 0)

    def compute_s(self, node: Node, num_tokens: int, num_cached: int, tpot_s: float) -> tuple[float, bool]:
        """How long a prompt takes of which so many tokens are cached, beside the requests that decode at the node;
        and whether these are not slowed beyond `tpot_s` between tokens, 0: there is no goal."""
        cost, chunk = self.cost_of(node), ALONE_CHUNK
        num_decodes = node.num_decoding if node.does(DECODE) else 0
        # what an idle node says that it holds is of a request that has ended since
        context = node.num_held_tokens if num_decodes else 0
        if num_decodes and tpot_s:
            left_s = PLANNED_SHARE * tpot_s - cost.without_prompt_s(num_decodes, context)
            chunk = min(chunk, cost.chunk_within(left_s, num_tokens // 2))
        num_cached = min(num_cached, num_tokens - 1)
        taken = max(chunk, SMALLEST_CHUNK)
        seconds = cost.prompt_s(num_tokens - num_cached, num_cached, taken, num_decodes, context)
        return seconds, chunk >= SMALLEST_CHUNK
