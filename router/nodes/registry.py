"""The registry of nodes: which may join, which are alive, and what each is expected to have cached.

Owns membership. Does not own requests: it says which node is lost, and the relay reacts. Messages travel through
`router/nodes/control.py`.

Invariants: all registered nodes of a model have the same fingerprint and KV layout, so any prefill node fits any decode
node of its model; a node is known by its epoch, and a new life of a node_id ends the earlier one, whatever models both
serve.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from baton.engine.cache.hashing import HASH_BYTES
from baton.router.nodes.prompt_queue import PromptQueue
from baton.wire.errors import Refused
from baton.wire.fingerprint import checkpoint_of, difference
from baton.wire.messages.membership import BOTH, DECODE, PREFILL, Heartbeat, Hello, NodeStatus
from baton.wire.messages.prefixes import CacheEvents
from baton.wire.messages.vocabulary import ROUTER_TO_NODE
from baton.wire.session import Session, new_session_number

DEAD_AFTER_S = 3.0
CLAIM_S = 60.0
"""For so long a node that was refused counts as one that wants its layout; it asks again within half of this."""
_MAX_CLAIMS = 1024
MAX_KNOWN_HASHES = 2**20
_MAX_RETURNING = 16
"""Lost nodes whose blocks are remembered. One that was only silent comes back in the same life, and requests that wait
for it begin before it has said again what it has."""
_log = logging.getLogger(__name__)


def _new_session() -> Session:
    return Session(new_session_number(), ROUTER_TO_NODE)


@dataclass(slots=True)
class Node:
    """One registration of a node, whose life is named by its epoch. `model` is the served model whose weights it has.
    `num_legs` counts those that this router has given it, also those that it has not received yet; `num_awaiting` of
    them wait for the KV of a prompt that another node computes. `live_keys` are those of the attempts that legs are of,
    by handoff id, in the order in which they were sent, and `missed_ids` those that it did not know when it last said
    which it knows, for the `num_pongs`th time. `prompts` are those that it has to compute itself. `num_other_legs` and
    `num_other_prompt_tokens` are of other routers, as of its last `Pong`. `num_steps` counts those that have told
    tokens. `is_ejected`: it is given no legs for a while, see `router/routing/ejection.py`. `preference`: which legs it
    is given where there is a choice, see `NodeRegistry.prefer`; "" becomes that of its Hello. `session` is the router's
    end of it. `rival`: the epoch of another one that wants to join under the same node_id, and when it first asked."""

    hello: Hello
    model: str
    heard_s: float
    status: NodeStatus
    num_legs: int = 0
    num_awaiting: int = 0
    num_other_legs: int = 0
    num_other_prompt_tokens: int = 0
    num_steps: int = 0
    prompts: PromptQueue = field(default_factory=PromptQueue)
    is_leaving: bool = False
    is_ejected: bool = False
    preference: str = ""
    live_keys: dict[bytes, bytes] = field(default_factory=dict)
    missed_ids: set[bytes] = field(default_factory=set)
    num_pongs: int = 0
    cached_hashes: set[bytes] = field(default_factory=set)
    session: Session = field(default_factory=_new_session)
    rival: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        self.preference = self.preference or self.hello.prefers or self.hello.role

    @property
    def epoch(self) -> int:
        """The random number that identifies this life."""
        return self.hello.epoch

    @property
    def node_id(self) -> str:
        """The node's name, kept over restarts."""
        return self.hello.node_id

    @property
    def role(self) -> str:
        """ "prefill" or "decode"."""
        return self.hello.role

    def does(self, role: str) -> bool:
        """Whether it can be given legs of that role."""
        return self.role == role or bool(self.hello.prefers)

    def prefers(self, role: str) -> bool:
        """Whether it is to be given legs of that role where there is a choice."""
        return self.preference in (role, BOTH)

    @property
    def load(self) -> int:
        """Legs of all routers."""
        return self.num_legs + self.num_other_legs

    @property
    def num_decoding(self) -> int:
        """Its legs whose prompt is computed: about the requests that it has in a step."""
        return max(0, self.load - self.num_awaiting - len(self.prompts))

    @property
    def num_held_tokens(self) -> int:
        """Tokens whose KV its requests hold, as of its last status."""
        return self.status.num_held_blocks * self.hello.layout.block_size


@dataclass(frozen=True, slots=True)
class _Limits:
    """Of all nodes of a model; see `NodeRegistry`."""

    decodes: Sequence[Node]
    most_tokens: int | None
    fewest_tokens: int
    fewest_seqs: int | None

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> _Limits:
        sizes = [node.hello.max_request_tokens for node in nodes]
        decodes = [node for node in nodes if node.role == DECODE] or nodes
        most = max((node.hello.max_request_tokens for node in decodes), default=None)
        fewest_seqs = min((node.hello.max_num_seqs for node in nodes), default=None)
        return cls(decodes, most, min(sizes, default=0), fewest_seqs)


class NodeRegistry:
    """Registered nodes by epoch. `fingerprints`: of each served model, by its name, that of the router's own
    checkpoint, or None if it has no weights: then the first node of an unknown fingerprint decides. At most one model
    may have None. `tokenizers`: of each served model the digest of the router's tokenizer; a node that has another one
    would read grammars differently, one without any cannot serve them. `epoch` names this life of the router, by
    default at random: nodes may serve other routers too, and tell them apart by it."""

    def __init__(
        self,
        fingerprints: Mapping[str, str | None],
        tokenizers: Mapping[str, str] | None = None,
        epoch: int | None = None,
    ) -> None:
        self.epoch = secrets.randbits(63) if epoch is None else epoch
        self._fingerprints = dict(fingerprints)
        self._tokenizers = dict(tokenizers or {})
        self._nodes: dict[int, Node] = {}
        self._returning: dict[int, set[bytes]] = {}
        self._claims: dict[str, tuple[Hello, float]] = {}
        # what was found since a node has joined or left: every request asks
        self._available: dict[tuple[str, str], list[Node]] = {}
        self._limits: dict[str, _Limits] = {}
        self._staying_decodes: list[Node] | None = None

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def models(self) -> list[str]:
        """The served models."""
        return list(self._fingerprints)

    def all(self) -> list[Node]:
        """Every registered node."""
        return list(self._nodes.values())

    def get(self, epoch: int) -> Node | None:
        """The node of that epoch."""
        return self._nodes.get(epoch)

    def available(self, role: str, model: str, without: AbstractSet[int] = frozenset()) -> list[Node]:
        """Nodes of a model that are to be given legs of a role, in order of registration; nodes in `without` only if
        there is no other. Somebody has to decode: if nobody prefers to, whoever can."""
        nodes = self._available.get((role, model))
        if nodes is None:
            staying = (node for node in self.of_model(model) if not (node.is_leaving or node.is_ejected))
            nodes = [node for node in staying if node.prefers(role)]
            self._available[role, model] = nodes
        left = [node for node in nodes if node.epoch not in without] if without else nodes
        return left or (self.able(role, model, without) if role == DECODE else nodes)

    def able(self, role: str, model: str, without: AbstractSet[int] = frozenset()) -> list[Node]:
        """As `available`, whatever they prefer."""
        able = [node for node in self.of_model(model) if node.does(role) and not node.is_leaving]
        return [node for node in able if node.epoch not in without] or able

    def prefer(self, epoch: int, role: str) -> None:
        """A mixed node is given other legs from now on. Nothing happens when it is gone."""
        node = self._nodes.get(epoch)
        if node is not None:
            node.preference = role
            self._forget_views()

    def named(self, name: str) -> list[Node]:
        """The node of that name, or else those of the group of that name. Nodes without a group are in none."""
        nodes = list(self._nodes.values())
        of_group = [node for node in nodes if name and node.hello.group == name]
        return [node for node in nodes if node.node_id == name] or of_group

    def set_ejected(self, epoch: int, *, is_ejected: bool) -> None:
        """A node is given no more legs, or is given them again. Nothing happens when it is gone."""
        node = self._nodes.get(epoch)
        if node is not None:
            node.is_ejected = is_ejected
            self._forget_views()

    def of_model(self, model: str) -> list[Node]:
        """The registered nodes of a model."""
        return [node for node in self._nodes.values() if node.model == model]

    def max_request_tokens(self, model: str, media: AbstractSet[str] = frozenset()) -> int | None:
        """The longest prompt plus output that a node of a model can hold, of its decode nodes if it has any, and of
        those that compute these kinds of `media`; None while there is none."""
        limits = self._limits_of(model)
        if not media:
            return limits.most_tokens
        able = (node.hello for node in limits.decodes if media <= set(node.hello.media))
        return max((hello.max_request_tokens for hello in able), default=None)

    def fewest_request_tokens(self, model: str) -> int:
        """The longest prompt plus output that each node of a model can hold."""
        return self._limits_of(model).fewest_tokens

    def max_num_seqs(self, model: str) -> int | None:
        """Requests that every node of a model can compute together; None while it has no node."""
        return self._limits_of(model).fewest_seqs

    @property
    def staying_decodes(self) -> Sequence[Node]:
        """The nodes of all models that prefer to decode, or else can, and do not leave."""
        if self._staying_decodes is None:
            able = [node for node in self._nodes.values() if node.does(DECODE) and not node.is_leaving]
            self._staying_decodes = [node for node in able if node.prefers(DECODE)] or able
        return self._staying_decodes

    @property
    def num_decoded_together(self) -> int:
        """Requests that all of them can compute together."""
        return sum(node.hello.max_num_seqs for node in self.staying_decodes)

    def _limits_of(self, model: str) -> _Limits:
        found = self._limits.get(model)
        if found is None:
            found = self._limits[model] = _Limits.of(self.of_model(model))
        return found

    def _forget_views(self) -> None:
        self._available.clear()
        self._limits.clear()
        self._staying_decodes = None

    def predecessor(self, hello: Hello, now_s: float) -> Node | None:
        """The registered node with the node_id of `hello` and another epoch, whose successor the sender wants to be.

        Raises `Refused` when that node has been heard since the sender first asked: both are alive.
        """
        earlier = next((node for node in self._nodes.values() if node.node_id == hello.node_id), None)
        if earlier is None or earlier.epoch == hello.epoch:
            return None
        if earlier.rival is None or earlier.rival[0] != hello.epoch:
            earlier.rival = (hello.epoch, now_s)
        elif earlier.heard_s > earlier.rival[1]:
            where = earlier.hello.http_address
            raise Refused(f"another {earlier.role} node called {hello.node_id} is alive at {where}: choose another id")
        return earlier

    def outvoted(self, hello: Hello, now_s: float) -> list[Node]:
        """The registered nodes of the model of `hello` with another layout, if more nodes that have served before want
        the layout of `hello`: after a restart of the router it must not count which of them was the first to join."""
        others = [node for node in self._nodes.values() if node.hello.fingerprint == hello.fingerprint]
        # they have one layout, all of them: each would take as long to compare as the rest of a join
        if not others or others[0].hello.layout == hello.layout or not (hello.session or hello.node_id in self._claims):
            return []
        alive = {name: claim for name, claim in self._claims.items() if now_s - claim[1] < CLAIM_S}
        self._claims = dict([*alive.items(), (hello.node_id, (hello, now_s))][-_MAX_CLAIMS:])
        wanted = [claim for claim, _ in self._claims.values() if claim.fingerprint == hello.fingerprint]
        num_same = sum(1 for claim in wanted if claim.layout == hello.layout)
        return others if num_same > len(others) else []

    def register(self, hello: Hello, now_s: float) -> Node | None:
        """Add a node; returns the earlier life of the same node_id, which is over. Raises `Refused`."""
        model = self._model_of(hello)
        known = self._nodes.get(hello.epoch)
        if known is not None:
            known.heard_s = now_s
            return None
        earlier = next((node for node in self._nodes.values() if node.node_id == hello.node_id), None)
        if earlier is not None:
            del self._nodes[earlier.epoch]
        self._forget_views()
        self._claims.pop(hello.node_id, None)
        cached_hashes = self._returning.pop(hello.epoch, set())
        self._nodes[hello.epoch] = Node(hello, model, now_s, hello.status, cached_hashes=cached_hashes)
        _log.info("%s node %s joined for %s: %d blocks", hello.role, hello.node_id, model, hello.num_blocks)
        return earlier

    def heartbeat(self, beat: Heartbeat, now_s: float) -> bool:
        """Record that a node lives. False when it is unknown."""
        node = self._nodes.get(beat.epoch)
        if node is None:
            return False
        node.heard_s, node.status = now_s, beat.status
        return True

    def cache_events(self, events: CacheEvents) -> None:
        """Update what a node is expected to have cached."""
        node = self._nodes.get(events.epoch)
        if node is None:
            return
        if events.is_snapshot:
            node.cached_hashes.clear()
        node.cached_hashes.update(_split(events.stored))
        node.cached_hashes.difference_update(_split(events.removed))
        if len(node.cached_hashes) > MAX_KNOWN_HASHES:
            node.cached_hashes.clear()  # a node that never reports evictions costs routing quality, not memory

    def leave(self, epoch: int) -> None:
        """Route nothing more to this node."""
        node = self._nodes.get(epoch)
        if node is not None and not node.is_leaving:
            node.is_leaving = True
            self._forget_views()
            # an idle node that leaves is a stop as planned: worth a line only to who looks for it
            level = logging.INFO if node.num_legs else logging.DEBUG
            _log.log(level, "%s node %s is leaving: %d requests to finish", node.role, node.node_id, node.num_legs)

    def remove(self, epoch: int) -> Node | None:
        """Forget a node that is gone."""
        self._forget_views()
        node = self._nodes.pop(epoch, None)
        if node is not None and not node.is_leaving:
            self._returning[epoch] = node.cached_hashes
            if len(self._returning) > _MAX_RETURNING:
                del self._returning[next(iter(self._returning))]
        return node

    def overdue(self, now_s: float) -> list[Node]:
        """Nodes that have sent nothing for `DEAD_AFTER_S`."""
        return [node for node in self._nodes.values() if now_s - node.heard_s > DEAD_AFTER_S]

    def _model_of(self, hello: Hello) -> str:
        """The model that a node serves. Raises `Refused` when it does not fit the other nodes of that model."""
        if hello.role not in (PREFILL, DECODE):
            raise Refused(f"role {hello.role!r} is not known here")
        if hello.prefers and (hello.role != DECODE or hello.prefers not in (PREFILL, DECODE, BOTH)):
            raise Refused(f"a {hello.role} node that prefers {hello.prefers!r} is not known here")
        others = [node for node in self._nodes.values() if node.node_id != hello.node_id]
        expected = {model: self._fingerprint_of(model, others) for model in self._fingerprints}
        model = next((model for model, known in expected.items() if _is_same(known, hello.fingerprint)), None)
        if model is None:
            model = next((model for model, known in expected.items() if known is None), None)
        if model is None:
            known = ", ".join(f"{known} ({model})" for model, known in expected.items())
            raise Refused(f"model differs: fingerprint {known} here, {hello.fingerprint} at {hello.node_id}")
        mates = [other for other in others if other.model == model]
        for mate in mates:
            if mate.hello.fingerprint != hello.fingerprint:
                raise Refused(difference(mate.hello.fingerprint, hello.fingerprint, hello.node_id))
        tokenizer = self._tokenizers.get(model, "")
        if tokenizer and hello.tokenizer and tokenizer != hello.tokenizer:
            raise Refused(f"tokenizer differs: {tokenizer} here, {hello.tokenizer} at {hello.node_id}")
        if mates:
            mates[0].hello.layout.require_same(hello.layout, hello.node_id)
        return model

    def _fingerprint_of(self, model: str, nodes: list[Node]) -> str | None:
        """None: not known before the model's first node joins."""
        of_nodes = (node.hello.fingerprint for node in nodes if node.model == model)
        return self._fingerprints[model] or next(of_nodes, None)


def _is_same(known: str | None, fingerprint: str) -> bool:
    """Whether both are of one checkpoint: how it is quantized is for its nodes to agree on."""
    return known is not None and checkpoint_of(known) == checkpoint_of(fingerprint)


def _split(hashes: bytes) -> list[bytes]:
    return [hashes[first : first + HASH_BYTES] for first in range(0, len(hashes) - HASH_BYTES + 1, HASH_BYTES)]
