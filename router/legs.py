"""The legs of one attempt: both are sent to the nodes of a route at the same time, and cancelled when the attempt ends.

Owns the load that an attempt puts on its nodes: each leg counts once from its sending until it is over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from router.nodes import Node
from router.routing import Route
from wire.messages import Cancel, Decode, Prefill, PrefillPeer
from wire.sampling import DecodingParams


class ControlSender(Protocol):
    """Sends messages to nodes."""

    def send(self, epoch: int, message: object) -> bool:
        """Returns False when the node cannot be reached. The caller need not react: the node is then declared lost."""
        ...


@dataclass(frozen=True, slots=True)
class RelayRequest:
    """The request of one choice, as nodes of `model` see it."""

    model: str
    prompt_ids: tuple[int, ...]
    params: DecodingParams
    cache_salt: bytes = b""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a request. `token_ids`: the prompt and what was emitted in earlier attempts."""

    handoff_id: bytes
    number: int
    request: RelayRequest
    token_ids: tuple[int, ...]

    def prefill_leg(self, decode: Node) -> Prefill:
        """The message for the prefill node; `decode` is the node that gets the KV."""
        return Prefill(
            handoff_id=self.handoff_id,
            attempt=self.number,
            token_ids=self.token_ids,
            num_prompt_tokens=len(self.request.prompt_ids),
            params=self.request.params,
            cache_salt=self.request.cache_salt,
            decode_node_id=decode.node_id,
            decode_epoch=decode.epoch,
        )

    def decode_leg(self, prefill: Node | None) -> Decode:
        """The message for the decode node; `prefill` is the node that computes the KV, None when the decode node
        does, and only then tells the log probabilities of the prompt."""
        peer = None if prefill is None else PrefillPeer(prefill.node_id, prefill.epoch, prefill.hello.peer_address)
        return Decode(
            handoff_id=self.handoff_id,
            attempt=self.number,
            token_ids=self.token_ids,
            num_prompt_tokens=len(self.request.prompt_ids),
            params=self.request.params if prefill is None else replace(self.request.params, prompt_logprobs=None),
            cache_salt=self.request.cache_salt,
            prefill_peer=peer,
        )


class Legs:
    """Both legs of one attempt, or the decode leg alone. Constructing it sends them."""

    def __init__(self, sender: ControlSender, route: Route, attempt: Attempt) -> None:
        self.decode_epoch = route.decode.epoch
        self._sender = sender
        self._cancel = Cancel(attempt.handoff_id, attempt.number)
        self._prefill = route.prefill
        self._decode: Node | None = route.decode
        if route.prefill is not None:
            self._send(route.prefill, attempt.prefill_leg(route.decode))
        self._send(route.decode, attempt.decode_leg(route.prefill))

    @property
    def prefill_runs(self) -> bool:
        """Whether a prefill leg was sent that is not over."""
        return self._prefill is not None

    def run_on(self, epoch: int) -> bool:
        """Whether a leg that is not over runs on the node of that epoch."""
        return any(node is not None and node.epoch == epoch for node in (self._prefill, self._decode))

    def end_prefill(self) -> None:
        """The decode node generates, so it has the KV: the prefill leg is over."""
        if self._prefill is not None:
            self._prefill.load -= 1
            self._prefill = None

    def cancel(self) -> None:
        """Cancel the legs that still run. Does nothing the second time."""
        for node in (self._prefill, self._decode):
            if node is not None:
                node.load -= 1
                self._sender.send(node.epoch, self._cancel)
        self._prefill = self._decode = None

    def _send(self, node: Node, message: Prefill | Decode) -> None:
        node.load += 1
        # a node that cannot be reached is declared lost soon, which starts the next attempt
        self._sender.send(node.epoch, message)
