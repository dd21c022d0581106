"""A relay in virtual time: the router's own routing, placement and legs over simulated nodes.

Owns the order of events. What decides is the code that serves (`baton.router.routing.selection`,
`baton.router.routing.placement`, `baton.router.requests.legs`, and in the nodes the scheduler and the cost model); what
is made up is how long a step, a message and a handoff take, and that nothing ever fails. A node's status reaches the
router once a second, as heartbeats do, and requests and tokens pass through a router that takes its time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from baton.bench.client.outcome import Failure, Outcome
from baton.bench.plan.simulated_node import BLOCK_SIZE, FINGERPRINT, NodeShape, SimulatedNode
from baton.engine.scheduler.request import RequestOutput
from baton.router.nodes.registry import Node, NodeRegistry
from baton.router.requests.legs import Attempt, Legs, RelayRequest, send_legs
from baton.router.routing.adaptation import WINDOW_S, Adaptation
from baton.router.routing.attainment import Attainment
from baton.router.routing.ejection import Ejections
from baton.router.routing.goals import NO_GOALS, Goals
from baton.router.routing.placement import Placement
from baton.router.routing.policies import make_policy
from baton.router.routing.route import Route
from baton.router.routing.selection import Routing
from baton.router.routing.suspicion import Probation
from baton.wire.errors import Overloaded
from baton.wire.layout import KvLayout, LayerKv
from baton.wire.messages import DECODE, PREFILL, CacheEvents, Decode, Heartbeat, Hello, Prefill
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams

_MODEL = "plan"
_BEAT_S = 1.0
_LAYOUT = KvLayout.of_layers("bfloat16", BLOCK_SIZE, [LayerKv(1, 16)])


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is simulated: nodes of each role, and the goals that the router and the nodes have (None: none).
    `token_transfer_s`: of a handoff, per token of the prompt, after that was computed. `router_s`: what the router
    needs for a request before it places it, and for a token before the client has it. `is_mixed`: nodes do any leg,
    and their roles are what they prefer at the start. `adapts`, `refuses_late`: as the settings of the router."""

    prefills: Sequence[NodeShape]
    decodes: Sequence[NodeShape]
    goals: Goals | None
    local_prefill_tokens: int = 16
    token_transfer_s: float = 0.0
    router_s: float = 0.0
    is_mixed: bool = False
    adapts: bool = False
    refuses_late: bool = False


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a load."""

    arrival_s: float
    token_ids: tuple[int, ...]
    num_output_tokens: int


@dataclass(slots=True)
class _Running:
    outcome: Outcome
    legs: Legs
    decode: int
    prefill: int | None


class Simulation:
    """Runs one load on one deployment, once. `placement`: in place of the usual one for its goals."""

    def __init__(self, deployment: Deployment, placement: Placement | None = None) -> None:
        self._deployment = deployment
        self._placement = placement or (None if deployment.goals is None else Placement(deployment.goals))
        self._registry = NodeRegistry({_MODEL: None})
        self._nodes: dict[int, SimulatedNode] = {}
        self._running: dict[RequestKey, _Running] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._now_s = 0.0
        self._told_s: dict[int, float] = {}
        for role, shapes in ((PREFILL, deployment.prefills), (DECODE, deployment.decodes)):
            for shape in shapes:
                self._join(role, shape)
        self._lend_cores()
        self.attainment = Attainment(deployment.goals or NO_GOALS)
        self.adaptation = Adaptation(self._registry, {_MODEL: self.attainment}, adapts=deployment.adapts)
        self._num_left = 0

    def run(self, requests: Sequence[PlannedRequest]) -> list[Outcome]:
        """What becomes of the requests, in their order; those that were refused have an error."""
        deployment = self._deployment
        policies = make_policy("prefix"), make_policy("prefix")
        refuse = self._refuse if deployment.refuses_late else None
        routing = Routing(
            self._registry,
            *policies,
            deployment.local_prefill_tokens,
            Probation(),
            Ejections(self._registry),
            self._placement,
            refuse,
        )
        self._num_left = len(requests)
        if deployment.adapts:
            self._at(WINDOW_S, self._window_over)
        outcomes = [_outcome(number, request) for number, request in enumerate(requests)]
        for request, outcome in zip(requests, outcomes, strict=True):
            self._at(request.arrival_s + deployment.router_s, partial(self._begin, routing, request, outcome))
        while self._events:
            self._now_s, _, call = heapq.heappop(self._events)
            call()
        return outcomes

    def send(self, epoch: int, message: object) -> bool:
        """See `ControlSender`: messages take no time."""
        node = self._nodes[epoch]
        if isinstance(message, Prefill):
            node.prefill(message, self._now_s)
        elif isinstance(message, Decode):
            node.decode(message, self._now_s)
        self._step(epoch)
        return True

    def _join(self, role: str, shape: NodeShape) -> None:
        node = SimulatedNode(shape)
        epoch = len(self._nodes) + 1
        self._nodes[epoch] = node
        name, num_blocks = f"{role}-{epoch}", shape.num_blocks
        sizes = num_blocks, num_blocks * BLOCK_SIZE, shape.max_num_seqs
        hello = Hello(role, name, epoch, FINGERPRINT, _LAYOUT, name, "", *sizes, node.status, "")
        if self._deployment.is_mixed:
            hello = replace(hello, role=DECODE, prefers=role)
        self._registry.register(hello, 0.0)

    def _lend_cores(self) -> None:
        """Make partners of the nodes that lend each other cores, a prefill and a decode node each."""
        nodes, num_prefills = list(self._nodes.values()), len(self._deployment.prefills)
        for prefill, decode in zip(nodes[:num_prefills], nodes[num_prefills:], strict=False):
            prefill.partner, decode.partner = decode, prefill

    def _begin(self, routing: Routing, request: PlannedRequest, outcome: Outcome) -> None:
        params = DecodingParams(temperature=0.0, ignore_eos=True, max_tokens=request.num_output_tokens)
        relayed = RelayRequest(_MODEL, request.token_ids, params)
        key = RequestKey.numbered(outcome.index + 1)
        try:
            route = routing.choose(
                _MODEL,
                request.token_ids,
                b"",
                frozenset(),
                request.num_output_tokens,
                now_s=self._now_s,
                allows_handoff=True,
                may_refuse=True,
            )
        except Overloaded:
            outcome.failure, outcome.status = Failure.HTTP_ERROR, 503
            outcome.end_s = outcome.closed_s = self._now_s
            self._num_left -= 1
            return
        attempt = Attempt(key.handoff_id, key.attempt, relayed, request.token_ids)
        # messages name the request, so it has to be known before the first step is over
        decode, prefill = route.decode.epoch, None if route.prefill is None else route.prefill.epoch
        (legs,) = send_legs(self, route, attempt, self._now_s)
        self._running[key] = _Running(outcome, legs, decode, prefill)

    def _step(self, epoch: int) -> None:
        """Begin a step of a node that is idle and has work."""
        node = self._nodes[epoch]
        if node.is_stepping or self._now_s < node.rests_until_s or not node.core.has_work:
            return
        end_s, outputs = node.step(self._now_s)
        if outputs:
            self._at(end_s, partial(self._step_ended, epoch, outputs))

    def _wake(self, epoch: int) -> None:
        """There may be room for what waits at a node."""
        self._nodes[epoch].take_in(self._now_s)
        self._step(epoch)

    def _step_ended(self, epoch: int, outputs: Sequence[RequestOutput]) -> None:
        node = self._nodes[epoch]
        node.is_stepping = False
        for output in outputs:
            running = self._running.get(output.key)
            if running is not None and output.token is not None:
                self._take(output, running, epoch)
        self._tell(epoch)
        if node.rests_until_s > self._now_s:
            self._at(node.rests_until_s, partial(self._step, epoch))
        self._wake(epoch)

    def _take(self, output: RequestOutput, running: _Running, epoch: int) -> None:
        outcome, legs, told_s = running.outcome, running.legs, self._now_s + self._deployment.router_s
        if legs.awaits_first:
            legs.first_came(self._now_s)
        if epoch == running.decode:
            legs.decode_began()
        if not outcome.chunk_s:
            self.attainment.first(told_s - outcome.sent_s, None)
        outcome.chunk_s.append(told_s)
        outcome.chunk_tokens.append(1)
        outcome.num_output_tokens += 1
        outcome.end_s = outcome.closed_s = told_s
        if output.finish_reason:
            if epoch == running.prefill:
                for each in (epoch, running.decode):
                    self._nodes[each].release(output.key)
                self._at(self._now_s, partial(self._wake, running.decode))
            del self._running[output.key]
            legs.cancel(self._now_s)
            self._num_left -= 1
            if outcome.num_output_tokens > 1:
                first_s, gaps = outcome.chunk_s[0], outcome.num_output_tokens - 1
                self.attainment.ended((told_s - first_s) / gaps, None)
        elif epoch == running.prefill:
            arrival_s = self._now_s + outcome.num_prompt_tokens * self._deployment.token_transfer_s
            self._at(arrival_s, partial(self._hand_over, output.key, running, epoch))

    def _hand_over(self, key: RequestKey, running: _Running, prefill: int) -> None:
        self._nodes[prefill].release(key)
        self._nodes[running.decode].arrived(key, self._now_s)
        running.legs.decode_began()
        for epoch in (prefill, running.decode):
            self._wake(epoch)

    def _tell(self, epoch: int) -> None:
        """What a node tells the router now and then."""
        changes = self._nodes[epoch].core.take_cache_changes()
        if changes.stored or changes.removed:
            stored, removed = b"".join(changes.stored), b"".join(changes.removed)
            self._registry.cache_events(CacheEvents(epoch, False, stored, removed))
        if self._now_s >= self._told_s.get(epoch, 0.0) + _BEAT_S:
            self._told_s[epoch] = self._now_s
            self._registry.heartbeat(Heartbeat(epoch, self._nodes[epoch].status), self._now_s)

    def _at(self, when_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), call))

    def _refuse(self, model: str, route: Route) -> None:
        self.attainment.refused(is_slow=route.is_slow)
        raise Overloaded("a goal would be missed", math.ceil(route.late_s))

    def _window_over(self) -> None:
        self.adaptation.end_window()
        if self._num_left:
            self._at(self._now_s + WINDOW_S, self._window_over)

    def members(self) -> list[Node]:
        """The router's view of the nodes."""
        return self._registry.all()

    def check(self) -> None:
        """Raise `RuntimeError` when something is left over."""
        for node in self._nodes.values():
            node.core.check()
            if node.core.status().num_held_blocks:
                raise RuntimeError("blocks are held although every request has ended")
        if any(member.load or len(member.prompts) for member in self.members()):
            raise RuntimeError("the router counts load although every request has ended")


def _outcome(index: int, request: PlannedRequest) -> Outcome:
    arrival_s = request.arrival_s
    return Outcome(index, 0, "", arrival_s, sent_s=arrival_s, num_prompt_tokens=len(request.token_ids))
