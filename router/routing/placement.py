"""Placement: who computes a prompt, so that first tokens come in time and streams keep flowing.

Owns the decision for one prompt between the prefill nodes and decode nodes that could compute it, given what each has
cached, what it was given before, and what its steps cost. Without goals the route stays as it is.

A stream goes to the decode node that the policy has chosen while that keeps the goal between tokens, then to the
decode node that does, then to a mixed node that prefers prompts. Where no prefill node can compute the prompt, it goes
to the chosen decode node while that is in time, else to the one that is done first. An answer of one token is
generated where its prompt is computed, and no KV is moved.

A decode node that computes a prompt takes small chunks beside its streams, as long as a step may take by the goal
(`baton.engine.scheduler.step_costs`): that is slower for the prompt, and no faster than a prefill node's work unless
that one has others to do first. So a prompt goes to the prefill node as long as its first token is expected within the
goal there, then to a decode node that reaches the goal, else to whoever is done first.

Invariant: predictions decide where a prompt is computed, and nothing else: a wrong one costs time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from baton.router.nodes.registry import Node
from baton.router.routing.goals import Goals
from baton.router.routing.policies import num_cached_blocks
from baton.router.routing.predictions import Predictions
from baton.router.routing.pulls import PlannedPull
from baton.wire.messages.membership import DECODE
from baton.wire.step_cost import PLANNED_SHARE

_MAX_COMPARED = 4
"""Nodes of a role that are looked at, those with the shortest queues: a decision takes microseconds for each."""
_NEAR = 0.5
"""The share of a goal from which on a prediction is compared with what comes of it: what a step or a message takes is
little then. It is below what the largest correction lets through, so there always is something to learn from."""
_SLOW_LATE_S = 1.0
"""When streams of all nodes miss their goal: in about so long some of them will have ended."""
_SHORT_ANSWER = 1
"""Tokens that a prefill node keeps: one comes with the prompt. Each further one would bound the chunks of other prompts
there by the goal between tokens."""


@dataclass(frozen=True, slots=True)
class Route:
    """The nodes that one attempt runs on. Without a prefill node the decode node computes the prompt too. `prompt_s`:
    how long that is expected to take. `is_kept`: the decode node computes it although a prefill node could, because
    that serves the goals. `ttft_s`: when the first token is expected, where that is to be compared with what comes of
    it; 0: it is not. `late_s`: in so many seconds it could be expected to meet its goals, 0: it can now. `is_slow`: the
    goal between tokens is missed. `pull`: what the node that computes the prompt is to have before."""

    decode: Node
    prefill: Node | None
    prompt_s: float = 0.0
    is_kept: bool = False
    ttft_s: float = 0.0
    late_s: float = 0.0
    is_slow: bool = False
    pull: PlannedPull | None = None


class _Offer(NamedTuple):
    """By when the first token has come, most probably, if `node` computes the prompt; the same and its two parts as the
    cost model says: how long it waits for others, and how long it takes. `keeps_pace`: the streams of the node are not
    slowed beyond their goal."""

    ttft_s: float
    wait_s: float
    prompt_s: float
    node: Node
    keeps_pace: bool


@dataclass(frozen=True, slots=True)
class PlacedPrompt:
    """A prompt to be placed. `goals`: of the request, if it has its own. `max_tokens` of its answer, if known."""

    num_tokens: int
    hashes: Sequence[bytes]
    goals: Goals | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Decides who computes a prompt so that `goals` are met, where the request has none of its own."""

    goals: Goals

    def choose(
        self, route: Route, prefills: Sequence[Node], decodes: Sequence[Node], placed: PlacedPrompt, now_s: float
    ) -> Route:
        """The route to take instead of `route`, which a policy has chosen among the same nodes."""
        aim, max_tokens = placed.goals or self.goals, placed.max_tokens
        predictions = Predictions.of((*prefills, *decodes), now_s)
        if predictions is None:
            return route
        prompt = _Prompt(placed.num_tokens, placed.hashes, predictions, aim)
        decode, is_slow = prompt.stream_at(route.decode, decodes, prefills)
        if prefills:
            best, is_kept = self._with_prefill(prompt, prefills, route.prefill, decodes, decode)
        else:
            best, is_kept = self._without_prefill(prompt, decodes, decode), False
        expected_s = best.wait_s + best.prompt_s
        noted_s = expected_s if expected_s >= _NEAR * aim.ttft_s > 0.0 else 0.0
        is_short = max_tokens is not None and max_tokens <= _SHORT_ANSWER and best.node.does(DECODE)
        if not prefills or is_kept or is_short or best.node is decode:
            chosen = Route(best.node, None, best.prompt_s, is_kept, noted_s)
        else:
            chosen = Route(decode, best.node, best.prompt_s, ttft_s=noted_s)
        # a prompt that takes too long even alone is not late as long as nobody is before it
        late_s = min(best.ttft_s - aim.ttft_s, best.wait_s) if aim.ttft_s else 0.0
        if is_slow or late_s > 0:
            return replace(chosen, late_s=max(late_s, _SLOW_LATE_S if is_slow else 0.0), is_slow=is_slow)
        return chosen

    def _with_prefill(
        self, prompt: _Prompt, prefills: Sequence[Node], preferred: Node | None, decodes: Sequence[Node], decode: Node
    ) -> tuple[_Offer, bool]:
        """The offer to take; and whether that keeps the prompt from the prefill nodes."""
        goals = prompt.aim
        best, is_kept = min(prompt.offers(prefills, self.goals.tpot_s, preferred), key=_ttft), False
        if best.ttft_s > goals.ttft_s:
            for offer in prompt.offers(decodes, self.goals.tpot_s, decode):
                if offer.keeps_pace and offer.ttft_s < best.ttft_s:
                    best, is_kept = offer, True
        return best, is_kept

    def _without_prefill(self, prompt: _Prompt, decodes: Sequence[Node], decode: Node) -> _Offer:
        """Of nodes that compute prompt and answer: the one that was chosen if it is in time, else the soonest."""
        offers = prompt.offers(decodes, self.goals.tpot_s, decode)
        own = next(offer for offer in offers if offer.node is decode)
        return own if own.ttft_s <= prompt.aim.ttft_s else min(offers, key=_ttft)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """`aim`: the goals that count for it."""

    num_tokens: int
    hashes: Sequence[bytes]
    predictions: Predictions
    aim: Goals

    def stream_at(self, chosen: Node, decodes: Sequence[Node], prefills: Sequence[Node]) -> tuple[Node, bool]:
        """The node that is to generate; and whether it is expected to miss the goal, as all others are."""
        planned_s = PLANNED_SHARE * self.aim.tpot_s
        if not planned_s or self._gap_s(chosen) <= planned_s:
            return chosen, False
        for nodes in (decodes, [node for node in prefills if node.does(DECODE)]):
            best = min(nodes, key=self._gap_s, default=chosen)
            if self._gap_s(best) <= planned_s:
                return best, False
        return chosen, True

    def _gap_s(self, node: Node) -> float:
        """The expected time between tokens of a further stream at this node."""
        num_streams = node.load if node.prefers(DECODE) else node.load - len(node.prompts)
        if num_streams >= node.hello.max_num_seqs:
            return inf
        cost = self.predictions.cost_of(node)
        return cost.without_prompt_s(num_streams + 1, node.num_held_tokens + self.num_tokens)

    def offers(self, nodes: Sequence[Node], tpot_s: float, preferred: Node | None) -> list[_Offer]:
        """Of the nodes with the shortest queues, and of the `preferred` one, which has most of the prompt cached."""
        wait_s = self.predictions.wait_s
        waits = [(wait_s(node), node is not preferred, number) for number, node in enumerate(nodes)]
        if len(waits) > _MAX_COMPARED:
            waits.sort()
            waits = waits[:_MAX_COMPARED] + [each for each in waits[_MAX_COMPARED:] if not each[1]]
        return [self._offer(nodes[number], waits_s, tpot_s) for waits_s, _, number in waits]

    def _offer(self, node: Node, wait_s: float, tpot_s: float) -> _Offer:
        """It is computed beside the requests that decode at the node."""
        num_cached = num_cached_blocks(node, self.hashes) * node.hello.layout.block_size
        seconds, keeps_pace = self.predictions.compute_s(node, self.num_tokens, num_cached, tpot_s)
        return _Offer(node.prompts.factor * (wait_s + seconds), wait_s, seconds, node, keeps_pace)


def _ttft(offer: _Offer) -> float:
    return offer.ttft_s
