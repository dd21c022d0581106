"""Placement: who computes a prompt, so that first tokens come in time and streams keep flowing.

Owns the decision for one prompt between the prefill nodes and decode nodes that could compute it, given what each has
cached, what it was given before, and what its steps cost. Without goals the route stays as it is.

A decode node that computes a prompt takes small chunks beside its streams, as long as a step may take by the goal
(`engine.scheduler.step_costs`): that is slower for the prompt, and no faster than a prefill node's work unless that one
has others to do first. So a prompt goes to the prefill node as long as its first token is expected within the goal
there, then to a decode node that reaches the goal, else to whoever is done first.

Invariant: predictions decide where a prompt is computed, and nothing else: a wrong one costs time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.goals import Goals
from router.nodes import Node
from router.policies import num_cached_blocks
from router.route import Route
from wire.step_cost import StepCost

_ALONE_CHUNK = 512
"""Tokens of a step in which nobody decodes: the usual budget of a step on a CPU; more would change little."""
_SMALLEST_CHUNK = 16
_MAX_COMPARED = 16
"""Nodes of a role that are looked at, those with the shortest queues: a decision takes microseconds for each."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """A route, and when the first token is expected on it. `keeps_tpot`: streams of the node are not slowed beyond
    their goal."""

    route: Route
    ttft_s: float
    keeps_tpot: bool = True


@dataclass(frozen=True, slots=True)
class Placement:
    """See the module."""

    goals: Goals

    def choose(
        self,
        route: Route,
        prefills: Sequence[Node],
        decodes: Sequence[Node],
        num_tokens: int,
        prompt_hashes: Sequence[bytes],
        now_s: float,
        goals: Goals | None = None,
    ) -> Route:
        """The route to take instead of `route`, which a policy has chosen among the same nodes. `goals`: of the
        request, if it has its own."""
        ttft_s = (goals or self.goals).ttft_s
        cost = _any_cost((*prefills, *decodes))
        if cost is None:
            return route  # no node has computed a prompt yet
        prompt = _Prompt(num_tokens, prompt_hashes, cost, now_s)
        away = min((prompt.at_prefill(route.decode, node) for node in _shortest(prefills, now_s)), key=_ttft)
        if away.ttft_s <= ttft_s:
            return away.route
        here = [prompt.at_decode(node, self.goals.tpot_s) for node in _shortest(decodes, now_s)]
        kept = min((offer for offer in here if offer.keeps_tpot), key=_ttft, default=None)
        if kept is None or kept.ttft_s >= away.ttft_s:
            return away.route
        return kept.route


@dataclass(frozen=True, slots=True)
class _Prompt:
    """`cost`: of nodes that do not know their own."""

    num_tokens: int
    hashes: Sequence[bytes]
    cost: StepCost
    now_s: float

    def at_prefill(self, decode: Node, node: Node) -> _Offer:
        """It is computed by a prefill node and handed to `decode`."""
        seconds = self._seconds(node, _ALONE_CHUNK, 0, 0)
        return _Offer(Route(decode, node, seconds), node.prompts.wait_s(self.now_s) + seconds)

    def at_decode(self, node: Node, tpot_s: float) -> _Offer:
        """It is computed by a decode node, beside the requests that decode there."""
        num_decodes, context = node.num_decoding, node.num_held_tokens
        cost, chunk = self._cost_of(node), _ALONE_CHUNK
        if num_decodes and tpot_s:
            left_s = tpot_s - cost.without_prompt_s(num_decodes, context)
            chunk = min(chunk, cost.chunk_within(left_s, self.num_tokens // 2))
        seconds = self._seconds(node, max(chunk, _SMALLEST_CHUNK), num_decodes, context)
        wait_s = node.prompts.wait_s(self.now_s)
        return _Offer(Route(node, None, seconds, is_kept=True), wait_s + seconds, chunk >= _SMALLEST_CHUNK)

    def _seconds(self, node: Node, chunk: int, num_decodes: int, context: int) -> float:
        block_size = node.hello.layout.block_size
        num_cached = min(num_cached_blocks(node, self.hashes) * block_size, self.num_tokens - 1)
        cost = self._cost_of(node)
        return cost.prompt_s(self.num_tokens - num_cached, num_cached, chunk, num_decodes, context)

    def _cost_of(self, node: Node) -> StepCost:
        own = node.status.cost
        return self.cost if own is None else own.with_prompts_of(self.cost)


def _ttft(offer: _Offer) -> float:
    return offer.ttft_s


def _any_cost(nodes: Sequence[Node]) -> StepCost | None:
    """Of a node that knows what prompts cost."""
    costs = (node.status.cost for node in nodes)
    return next((cost for cost in costs if cost is not None and cost.knows_prompts), None)


def _shortest(nodes: Sequence[Node], now_s: float) -> Sequence[Node]:
    if len(nodes) <= _MAX_COMPARED:
        return nodes
    return sorted(nodes, key=lambda node: node.prompts.wait_s(now_s))[:_MAX_COMPARED]
