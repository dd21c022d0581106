"""Routing: which decode node takes a request, and whether a prefill node computes its prompt.

Owns the choice, not the membership (`router/nodes.py`) and not the legs (`router/legs.py`). A decode node computes a
prompt itself when it lacks few tokens of it, when there is no prefill node, and when its handoffs have failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from engine.cache.hashing import extend_hashes, root_hash
from router.nodes import Node, NodeRegistry
from router.policies import Policy, num_cached_blocks
from wire.errors import NoNode
from wire.messages import DECODE, PREFILL


@dataclass(frozen=True, slots=True)
class Route:
    """The nodes of one attempt. Without a prefill node the decode node computes the prompt too."""

    decode: Node
    prefill: Node | None


@dataclass(frozen=True, slots=True)
class Routing:
    """Chooses routes by one policy for each role. See `RelaySettings` for `local_prefill_tokens`."""

    registry: NodeRegistry
    prefill_policy: Policy
    decode_policy: Policy
    local_prefill_tokens: int

    def choose(
        self,
        model: str,
        token_ids: Sequence[int],
        cache_salt: bytes,
        avoided: AbstractSet[int],
        *,
        allows_handoff: bool,
    ) -> Route:
        """A route for prompt and emitted tokens over nodes of `model`; nodes whose epoch is in `avoided` only where
        there is no other.

        Raises `NoNode` without a decode node.
        """
        decodes = self.registry.available(DECODE, model, avoided)
        if not decodes:
            raise NoNode("no decode node is available")
        hashes: list[bytes] = []
        hello = decodes[0].hello
        extend_hashes(hashes, token_ids, hello.layout.block_size, root_hash(hello.fingerprint, cache_salt))
        decode = self.decode_policy.choose(decodes, hashes)
        prefills = self.registry.available(PREFILL, model, avoided) if allows_handoff else []
        num_cached = num_cached_blocks(decode, hashes) * hello.layout.block_size
        if not prefills or len(token_ids) - num_cached <= self.local_prefill_tokens:
            return Route(decode, None)
        return Route(decode, self.prefill_policy.choose(prefills, hashes))
