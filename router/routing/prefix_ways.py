"""Three ways for a prompt whose beginning somebody has cached: compute what its node lacks, pull that first, or stay.

Owns the choice, by predicted time to the first token. A policy, or a placement by goals, has chosen a route; the node
that is to compute the prompt there may have less of it than others. Then what it lacks may be *pulled* from whoever has
most, or the prompt may *stay* at the decode node, which has computed the last answer of a conversation and computes
what is new. That holds up the streams of the decode node, so what it costs each of them counts as if the prompt itself
came later by it.

Another way than computing is taken only where it is expected to be sooner by `SURELY`: predictions err, and nothing may
be slower than computing by more than that. So a pull is waited for no longer than `RISKED` of what computing takes, and
as long again as computing what has come would have taken; none is begun that is expected to take longer. What has come
by then is used. There is no bound in tokens. Without cost models nothing changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from baton.router.nodes.registry import Node
from baton.router.routing.placement import Route
from baton.router.routing.policies import num_cached_blocks
from baton.router.routing.predictions import Predictions
from baton.router.routing.pulls import PlannedPull, PullRecords

SURELY = 0.9
"""The share of the time for computing that another way takes at most."""
RISKED = 0.1
"""The share of the time for computing for which a pull may bring nothing."""


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    """A prompt as the ways see it: all that has to be computed, with the hashes of its full blocks. The first
    `num_pullable` tokens can be pulled. `tpot_s`: the goal between tokens, 0 without one."""

    num_tokens: int
    hashes: Sequence[bytes]
    num_pullable: int
    tpot_s: float = 0.0


class PrefixWays:
    """Chooses among the ways. `records`: what is known of pulls."""

    def __init__(self, records: PullRecords) -> None:
        self.records = records

    def choose(self, route: Route, prompt: KnownPrompt, nodes: Sequence[Node], now_s: float) -> Route:
        """The route to take instead of `route`. `nodes`: all of the model."""
        computes = route.prefill or route.decode
        predictions = Predictions.of(chain((computes, route.decode), nodes), now_s)
        if predictions is None:
            return route
        comparison = _Comparison(prompt, predictions, computes)
        ways = [comparison.stay(route), self._pull(route, comparison, nodes)]
        best_s, best = min((way for way in ways if way is not None), key=_seconds, default=(0.0, None))
        if best is None or best_s > SURELY * comparison.compute_s:
            return replace(route, prompt_s=comparison.prompt_s) if not route.prompt_s else route
        late_s = route.late_s if route.is_slow else max(0.0, route.late_s - (comparison.compute_s - best_s))
        self.records.num_stays += best.pull is None
        return replace(best, late_s=late_s)

    def _pull(self, route: Route, comparison: _Comparison, nodes: Sequence[Node]) -> tuple[float, Route] | None:
        """Pull what another node has from the one that has most of it, and compute the rest where it was to be
        computed."""
        computes = comparison.computes
        found = holder_of(comparison.prompt, computes, nodes)
        if found is None:
            return None
        source, num_tokens, num_known = found
        layout = computes.hello.layout
        num_bytes = (num_tokens - num_known) // layout.block_size * layout.block_bytes
        expected = self.records.expected_of(source, computes, num_bytes, comparison.predictions.now_s)
        if expected is None:
            return None
        patience_s, token_s = RISKED * comparison.compute_s, comparison.token_s(num_known)
        planned = PlannedPull(source, computes, num_tokens, num_known, expected.total_s, patience_s, token_s)
        if expected.overhead_s > patience_s or expected.total_s > planned.bound_s:
            return None
        rest_s = comparison.with_cached_s(num_tokens)
        return max(comparison.wait_s, expected.total_s) + rest_s, replace(
            route, pull=planned, prompt_s=rest_s, ttft_s=0.0
        )


class _Comparison:
    """A prompt at the node that is to compute it, which has its first `num_known` tokens."""

    def __init__(self, prompt: KnownPrompt, predictions: Predictions, computes: Node) -> None:
        self.prompt, self.predictions, self.computes = prompt, predictions, computes
        self.num_known = num_cached_blocks(computes, prompt.hashes) * computes.hello.layout.block_size
        self.wait_s = predictions.wait_s(computes)
        self.prompt_s = self.with_cached_s(self.num_known)

    @property
    def compute_s(self) -> float:
        """Until its first token, if the node computes all that it lacks."""
        return self.wait_s + self.prompt_s

    def with_cached_s(self, num_cached: int) -> float:
        """How long the node computes if it has so many tokens."""
        return self.predictions.compute_s(self.computes, self.prompt.num_tokens, num_cached, self.prompt.tpot_s)[0]

    def token_s(self, place: int) -> float:
        """How long the node computes for the token at that place, its share of a step left out. Later ones take more:
        they attend to more."""
        return self.predictions.cost_of(self.computes).tokens_s(1, place)

    def stay(self, route: Route) -> tuple[float, Route] | None:
        """Until the first token if the decode node computes what is new to it, and what that costs its streams. None
        where it has no more than the node that was to compute, or would slow its streams beyond their goal."""
        decode, prompt, predictions = route.decode, self.prompt, self.predictions
        num_cached = num_cached_blocks(decode, prompt.hashes) * decode.hello.layout.block_size
        if num_cached <= self.num_known:
            return None
        seconds, keeps_pace = predictions.compute_s(decode, prompt.num_tokens, num_cached, prompt.tpot_s)
        if not keeps_pace:
            return None
        # a decode node has computed few prompts, and may know little of what they cost
        seconds = max(seconds, self.with_cached_s(num_cached))
        new = prompt.num_tokens - min(num_cached, prompt.num_tokens - 1)
        held_up_s = decode.num_decoding * predictions.cost_of(decode).tokens_s(new, num_cached)
        stays = replace(route, prefill=None, prompt_s=seconds, ttft_s=0.0)
        return predictions.wait_s(decode) + seconds + held_up_s, stays


def holder_of(prompt: KnownPrompt, target: Node, nodes: Sequence[Node]) -> tuple[Node, int, int] | None:
    """The node that has most of what can be pulled of a prompt, how many tokens of it, and how many `target` has. None:
    nobody has more than that."""
    block_size = target.hello.layout.block_size
    hashes = prompt.hashes[: prompt.num_pullable // block_size] if target.hello.can_pull else []
    num_known = most = num_cached_blocks(target, hashes)
    found = None
    for node in nodes:
        if most >= len(hashes):
            break
        # one look tells a node that cannot have more, however long the prompt is
        if hashes[most] in node.cached_hashes and _may_lend(node) and num_cached_blocks(node, hashes) > most:
            found, most = node, num_cached_blocks(node, hashes)
    return None if found is None else (found, most * block_size, num_known * block_size)


def _may_lend(node: Node) -> bool:
    return bool(node.hello.peer_address) and not node.is_leaving and not node.is_ejected


def _seconds(way: tuple[float, Route]) -> float:
    return way[0]
