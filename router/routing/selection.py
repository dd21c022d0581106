"""Selection of nodes: which decode node takes a request, and whether a prefill node computes its prompt.

Owns the choice, not the membership (`router/nodes/registry.py`) and not the legs (`router/requests/attempt.py`). A
decode node computes a prompt itself when it lacks few tokens of it, when there is no prefill node, when its handoffs
have failed, and when that serves the goals for latency (`router/routing/placement.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeAlias

from baton.engine.cache.hashing import block_hashes
from baton.router.nodes.registry import Node, NodeRegistry
from baton.router.routing.ejection import Ejections
from baton.router.routing.goals import Goals
from baton.router.routing.placement import PlacedPrompt, Placement, Route
from baton.router.routing.policies import Policy, num_cached_blocks
from baton.router.routing.prefix_ways import KnownPrompt, PrefixWays
from baton.router.routing.suspicion import Confinement, Probation
from baton.wire.errors import NoNode
from baton.wire.messages.membership import DECODE, PREFILL
from baton.wire.prompt import Prompt

_Find: TypeAlias = Callable[[str, str, AbstractSet[int]], list[Node]]


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What one attempt asks of a route over nodes of `model`: to compute `prompt` and `output_ids` behind it, and
    `max_tokens` more at most, None: at least one. `goals`: its own, None for the router's. Nodes whose epoch is in
    `avoided` get it only where there is no other.

    `computes_all`: whoever computes the prompt computes all of it, whatever it has cached. `confinement`: the only
    nodes that may compute anything of it but further tokens. `may_refuse`: nothing was done for it yet. `may_pull`:
    some of it may be copied to the node that computes it.
    """

    model: str
    prompt: Prompt
    output_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    goals: Goals | None = None
    avoided: AbstractSet[int] = frozenset()
    allows_handoff: bool = True
    computes_all: bool = False
    confinement: Confinement | None = None
    may_refuse: bool = False
    may_pull: bool = False


@dataclass(frozen=True, slots=True)
class Routing:
    """Chooses routes by one policy for each role, then by `placement`, then by who has most of a prompt (`ways`; None
    where a policy ignores caches). See `RelaySettings` for `local_prefill_tokens`. `refuse` raises, and counts, for a
    request of a model whose route would miss its goals."""

    registry: NodeRegistry
    prefill_policy: Policy
    decode_policy: Policy
    local_prefill_tokens: int
    probation: Probation
    ejections: Ejections
    ways: PrefixWays | None
    placement: Placement | None = None
    refuse: Callable[[str, Route], None] | None = None

    def choose(self, asked: RouteRequest, now_s: float) -> Route:
        """A route for an attempt. Of each role only nodes that have room for what the request may become, and that
        compute its media.

        Raises `NoNode` without a decode node, and `Overloaded` when it is refused because it would miss its goals.
        """
        self.ejections.readmit(now_s)
        decodes, prefills = self._candidates(asked)
        hello, num_tokens = decodes[0].hello, asked.prompt.num_tokens + len(asked.output_ids)
        hashes = block_hashes(hello.fingerprint, asked.prompt, asked.output_ids, hello.layout.block_size)
        decode = self.decode_policy.choose(decodes, hashes)
        num_cached = 0 if asked.computes_all else num_cached_blocks(decode, hashes) * hello.layout.block_size
        prefills = [node for node in prefills if node is not decode]
        if num_tokens - num_cached <= self.local_prefill_tokens:
            return Route(decode, None)
        stays = self.placement is None and decode.prefers(PREFILL)
        route = Route(decode, self.prefill_policy.choose(prefills, hashes) if prefills and not stays else None)
        if asked.computes_all or asked.confinement is not None:
            return route
        tpot_s = 0.0
        if self.placement is not None:
            placed = PlacedPrompt(num_tokens, hashes, asked.goals, asked.max_tokens)
            route, tpot_s = self.placement.choose(route, prefills, decodes, placed, now_s), self.placement.goals.tpot_s
        if self.ways is not None:
            num_pullable = asked.prompt.num_tokens if asked.may_pull else 0
            known = KnownPrompt(num_tokens, hashes, num_pullable, tpot_s)
            route = self.ways.choose(route, known, self.registry.of_model(asked.model), now_s)
        if route.late_s and asked.may_refuse and self.refuse is not None:
            self.refuse(asked.model, route)
        return route

    def _candidates(self, asked: RouteRequest) -> tuple[list[Node], list[Node]]:
        """The decode nodes, at least one, and the prefill nodes that may take an attempt."""
        find = self.registry.available if asked.confinement is None else self.registry.able
        model, avoided, media = asked.model, asked.avoided, asked.prompt.media_kinds
        num_tokens = asked.prompt.num_tokens + len(asked.output_ids)
        decodes = self._fit(find, DECODE, model, avoided, num_tokens + (asked.max_tokens or 1), media)
        prefills = self._fit(find, PREFILL, model, avoided, num_tokens + 1, media) if asked.allows_handoff else []
        if asked.confinement is not None:
            decodes, prefills = self._confined(asked.confinement, decodes, prefills)
        if not decodes:
            raise NoNode("no decode node is available")
        return decodes, prefills

    def another_decode(
        self,
        model: str,
        num_tokens: int,
        avoided: AbstractSet[int],
        max_tokens: int | None,
        preferred: Node | None = None,
        media: AbstractSet[str] = frozenset(),
    ) -> Node | None:
        """The decode node with the least load that can go on at once with a request of so many tokens, and has room for
        what it may become, or the `preferred` one if it can; None: there is none now."""
        most_tokens = num_tokens + (max_tokens or 1)
        decodes = self._fit(self.registry.available, DECODE, model, avoided, most_tokens, media)
        able = [node for node in decodes if node.load < node.hello.max_num_seqs and _has_blocks(node, num_tokens + 1)]
        return min(able, key=lambda node: (node is not preferred, node.load), default=None)

    def _fit(
        self,
        find: _Find,
        role: str,
        model: str,
        avoided: AbstractSet[int],
        num_tokens: int,
        media: AbstractSet[str],
    ) -> list[Node]:
        """Nodes that `find` finds, with room for `num_tokens`, and that compute these kinds of media."""
        able = find(role, model, avoided)
        if num_tokens <= self.registry.fewest_request_tokens(model) and not media:
            return able
        # what nodes prefer, and which are avoided, counts less than which can
        others = (find(role, model, frozenset()), self.registry.able(role, model) if role == DECODE else [])
        for nodes in (able, *others):
            fit = [node for node in nodes if node.hello.max_request_tokens >= num_tokens]
            fit = [node for node in fit if media <= set(node.hello.media)]
            if fit:
                return fit
        return []

    def _confined(
        self, confinement: Confinement, decodes: Sequence[Node], prefills: Sequence[Node]
    ) -> tuple[list[Node], list[Node]]:
        """Those of the nodes that a confined request may begin at now."""
        is_free, is_lifted = self.probation.is_free, confinement.is_lifted
        again = [node for node in prefills if is_free(node.epoch)]
        fit = [node for node in decodes if is_free(node.epoch)]
        if not is_lifted:
            again = [node for node in again if node.node_id in confinement.prefills]
            if confinement.decodes:
                fit = [node for node in fit if node.node_id in confinement.decodes]
            else:
                fit = list(decodes) if again else []
        return fit, again


def _has_blocks(node: Node, num_tokens: int) -> bool:
    status = node.status
    return -(-num_tokens // node.hello.layout.block_size) <= status.num_free_blocks + status.num_cached_blocks
