"""One attempt at a request: its legs are sent to the nodes of a route at the same time, and cancelled when it ends.

Owns the load that an attempt puts on its nodes: each leg counts once from its sending until it is over, and its prompt
is in the queue of the node that computes it until there is a token. Choices of one prompt begin with legs that they
share: the prompt is computed once, which is the load of one prefill leg, and every choice is generated, so each counts
at the decode node.

An attempt fails when its decode leg stands still while the node does not. The bound is in steps of the node, so it
follows the node's speed: a request that a decode node computes gets a token with each of its steps. It is not counted
while anything waits at the node, because a preempted request waits too, nor before the node has sampled anything of the
attempt: until then leases bound the handoff.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Protocol

from baton.router.nodes.prompt_queue import QueuedPrompt
from baton.router.nodes.registry import Node
from baton.router.routing.goals import Goals
from baton.router.routing.placement import Route
from baton.wire.messages.legs import Cancel, Decode, Prefill, PrefillPeer
from baton.wire.messages.membership import live_key
from baton.wire.messages.prefixes import AwaitedPrefix
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams

STANDS_S = 10.0
"""A leg has stood still for so long at least, so that what the node says of itself is newer than the last token."""
MAX_STEPS = 256
_MAX_MISSED = 2


class ControlSender(Protocol):
    """Sends messages to nodes."""

    def send(self, epoch: int, message: object) -> bool:
        """The message arrives, unless the node is lost, which its legs are told. Returns False when it is unknown."""
        ...


@dataclass(frozen=True, slots=True)
class RelayRequest:
    """The request of one choice, as nodes of `model` see it. `emitted_ids`: its first tokens, where they are
    known. `goals`: None for those of the router. The media of the prompt have payload, which stays here as long as any
    node may have to compute it."""

    model: str
    prompt: Prompt
    params: DecodingParams
    emitted_ids: tuple[int, ...] = ()
    goals: Goals | None = None

    def max_tokens_behind(self, num_output: int) -> int | None:
        """How many more tokens it may have when it has so many."""
        return self.params.max_tokens and self.params.max_tokens - num_output


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a request. `output_ids`: what was emitted in earlier attempts. `forks`: the handoff ids of further
    choices, with the next numbers, that begin with it. `awaited`: what the node that computes the prompt waits for."""

    handoff_id: bytes
    number: int
    request: RelayRequest
    output_ids: tuple[int, ...] = ()
    forks: tuple[bytes, ...] = ()
    awaited: AwaitedPrefix | None = None

    def prefill_leg(self, decode: Node) -> Prefill:
        """The message for the prefill node; `decode` is the node that gets the KV, and drafts."""
        return Prefill(
            handoff_id=self.handoff_id,
            attempt=self.number,
            prompt=self.request.prompt,
            params=self._params_without_prediction,
            decode_node_id=decode.node_id,
            decode_epoch=decode.epoch,
            output_ids=self.output_ids,
            forks=self.forks,
            awaited=self.awaited,
        )

    @property
    def _params_without_prediction(self) -> DecodingParams:
        params = self.request.params
        return replace(params, prediction_ids=()) if params.prediction_ids else params

    def decode_leg(self, prefill: Node | None) -> Decode:
        """The message for the decode node; `prefill` is the node that computes the KV, None when the decode node
        does, and only then tells the log probabilities of the prompt."""
        peer = None if prefill is None else PrefillPeer(prefill.node_id, prefill.epoch, prefill.hello.peer_address)
        return Decode(
            handoff_id=self.handoff_id,
            attempt=self.number,
            prompt=self.request.prompt if prefill is None else self.request.prompt.without_payload(),
            params=self.request.params if prefill is None else replace(self.request.params, prompt_logprobs=None),
            prefill_peer=peer,
            output_ids=self.output_ids,
            forks=self.forks,
            awaited=self.awaited if prefill is None else None,
        )


class Progress:
    """Of one decode leg, looked at with every Pong of its node."""

    def __init__(self) -> None:
        self._num_tokens = -1
        self._since_s = 0.0
        self._num_steps = 0

    def has_stopped(self, node: Node, num_tokens: int, now_s: float) -> bool:
        """Whether nothing has come behind `num_tokens` tokens, although the node has run `MAX_STEPS` steps since, or
        has nothing to run."""
        if num_tokens != self._num_tokens or node.status.num_waiting:
            self._num_tokens, self._since_s, self._num_steps = num_tokens, now_s, node.num_steps
            return False
        goes_on = node.num_steps - self._num_steps >= MAX_STEPS or not node.status.num_running
        return goes_on and now_s - self._since_s >= STANDS_S


class Legs:
    """Both legs of one attempt, or the decode leg alone, as one choice sees them; they have just been sent.
    `prefill_load`: what it counts at the prefill node, 0 when another choice counts there; that one has the prompt in
    the queue as well. `has_prefilled`: the prefill node has sampled token 1. `has_decoded`: the decode node has sampled
    a token. `awaits_first`: no token has come. `is_move`: the node that has generated so far stands in the place of a
    prefill node."""

    def __init__(
        self,
        sender: ControlSender,
        route: Route,
        cancel: Cancel,
        prefill_load: int,
        prompt: QueuedPrompt | None,
        *,
        is_move: bool = False,
    ) -> None:
        self.decode_epoch = route.decode.epoch
        self.has_prefilled = self._is_move = is_move
        self.has_decoded = False
        self.awaits_first = True
        self._sent = {node.epoch: node.session.sent for node in (route.decode, route.prefill) if node is not None}
        self._num_missed = dict.fromkeys(self._sent, 0)
        self._prefill_has_it = False
        self._progress = Progress()
        self._sender = sender
        self._cancel = cancel
        self._prefill = route.prefill
        self._decode: Node | None = route.decode
        self._prefill_load = prefill_load
        self._computes = route.prefill or route.decode
        self._prompt = prompt
        for node in (route.decode, route.prefill):
            if node is not None:
                node.live_keys[cancel.handoff_id] = live_key(cancel.handoff_id, cancel.attempt)
        route.decode.num_legs += 1
        if route.prefill is not None:
            route.prefill.num_legs += prefill_load
            route.decode.num_awaiting += 1

    @property
    def prefill_runs(self) -> bool:
        """Whether a prefill leg was sent that is not over."""
        return self._prefill is not None

    def were_given_to(self, epoch: int) -> bool:
        """Whether a leg, over or not, was sent to the node of that epoch."""
        return epoch in self._sent

    @property
    def is_moving(self) -> bool:
        """Whether a node is to go on with the KV of another one, and has not begun."""
        return self._is_move and self.prefill_runs

    def generates_on(self, epoch: int) -> bool:
        """Whether the node of that epoch generates and has said so: the KV is there, or was computed there."""
        if self._prefill is not None or self._decode is None or self.awaits_first:
            return False
        return self._decode.epoch == epoch

    @property
    def epochs(self) -> AbstractSet[int]:
        """Of the nodes that were given a leg."""
        return self._sent.keys()

    @property
    def prefill_epoch(self) -> int | None:
        """Of the prefill node whose leg is not over."""
        return None if self._prefill is None else self._prefill.epoch

    @property
    def epoch_at_end(self) -> int | None:
        """Of the node that has served the request up to now; None: none has yet."""
        return self.decode_epoch if self.has_decoded else self.prefill_epoch if self.has_prefilled else None

    def leave(self) -> None:
        """The node that generated has ended its leg, and hands its KV over."""
        if self._decode is not None:
            self._decode.num_legs -= 1
            self._decode.live_keys.pop(self._cancel.handoff_id, None)
            self._decode = None

    def run_on(self, epoch: int) -> bool:
        """Whether a leg that is not over runs on the node of that epoch."""
        prefill, decode = self._prefill, self._decode
        return (decode is not None and decode.epoch == epoch) or (prefill is not None and prefill.epoch == epoch)

    def are_missed(self, node: Node, live: AbstractSet[bytes], received: int) -> bool:
        """Whether the node, which knows the attempts `live` and has had every message up to `received`, has forgotten
        its leg. It has to say so twice: the end of a leg may reach the router from the other node, later. That is
        the prefill node until it has prefilled, and while nothing is heard of it, it may have ended the request."""
        is_decode = node.epoch == self.decode_epoch
        if received < self._sent[node.epoch] or (self.has_prefilled and not is_decode):
            return False
        if live_key(self._cancel.handoff_id, self._cancel.attempt) in live:
            self._num_missed[node.epoch] = 0
            self._prefill_has_it = self._prefill_has_it or not is_decode
            return False
        if is_decode and self._prefill is not None and not self.has_prefilled:
            if not self._prefill_has_it:
                return False
            self._prefill_has_it = False  # it has to say so again before the next time counts
        self._num_missed[node.epoch] += 1
        return self._num_missed[node.epoch] >= _MAX_MISSED

    def stand_still(self, node: Node, num_tokens: int, now_s: float) -> bool:
        """Whether the node does not go on with its leg, of which the router has `num_tokens` tokens."""
        if not self.has_decoded or node.epoch != self.decode_epoch:
            return False
        return self._progress.has_stopped(node, num_tokens, now_s)

    @property
    def silent_nodes(self) -> list[Node]:
        """The nodes whose legs run and that have said nothing of them."""
        nodes = [node for node in (self._prefill, self._decode) if node is not None]
        return [node for node in nodes if not self.has_computed(node.epoch)]

    def has_computed(self, epoch: int) -> bool:
        """Whether the node of that epoch has said anything of its leg."""
        return self.has_decoded if epoch == self.decode_epoch else self.has_prefilled

    def first_came(self, now_s: float) -> None:
        """A token has come, so the prompt is computed."""
        self.awaits_first = False
        if self._prompt is not None:
            self._computes.prompts.computed(self._prompt, now_s)
            self._prompt = None

    def decode_began(self) -> None:
        """The decode node generates, so it has the KV: the prefill leg is over."""
        self.has_decoded = True
        self._end_prefill()

    def _end_prefill(self) -> None:
        if self._prefill is not None:
            self._prefill.num_legs -= self._prefill_load
            self._prefill.live_keys.pop(self._cancel.handoff_id, None)
            self._prefill = None
            if self._decode is not None:
                self._decode.num_awaiting -= 1

    def cancel(self, now_s: float) -> None:
        """Cancel the legs that still run; those of other choices go on. Does nothing the second time."""
        nodes = [node for node in (self._prefill, self._decode) if node is not None]
        self.awaits_first = False
        if self._prompt is not None:
            self._computes.prompts.remove(self._prompt, now_s)
            self._prompt = None
        self._end_prefill()
        self.leave()
        for node in nodes:
            self._sender.send(node.epoch, self._cancel)


def send_legs(sender: ControlSender, route: Route, attempt: Attempt, now_s: float) -> list[Legs]:
    """Send the legs of an attempt. They are returned once for each of its choices, in order."""
    if route.prefill is not None:
        sender.send(route.prefill.epoch, attempt.prefill_leg(route.decode))
    sender.send(route.decode.epoch, attempt.decode_leg(route.prefill))
    prompt = (route.prefill or route.decode).prompts.add(route.prompt_s, now_s, route.ttft_s)
    cancels = [Cancel(choice, attempt.number) for choice in (attempt.handoff_id, *attempt.forks)]
    first = Legs(sender, route, cancels[0], 1, prompt)
    return [first, *(Legs(sender, route, cancel, 0, None) for cancel in cancels[1:])]


def send_move(sender: ControlSender, route: Route, attempt: Attempt) -> Legs:
    """Send the decode leg of an attempt whose KV comes from the node that has generated so far, `route.prefill`: that
    one has been asked already."""
    sender.send(route.decode.epoch, attempt.decode_leg(route.prefill))
    return Legs(sender, route, Cancel(attempt.handoff_id, attempt.number), 1, None, is_move=True)
