"""The legs of one attempt: sent at once to the nodes of a route, and cancelled there when nobody wants them any more.

Owns the load that an attempt puts on its nodes: each leg counts once from its sending until it is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from router.nodes import Node
from router.routing import Route
from wire.messages import Cancel, Decode, Prefill, PrefillPeer
from wire.sampling import DecodingParams


class ControlSender(Protocol):
    """Sends messages to nodes."""

    def send(self, epoch: int, message: object) -> bool:
        """False when the node cannot be reached: the caller need not care, it is declared lost soon."""
        ...


@dataclass(frozen=True, slots=True)
class RelayRequest:
    """What one choice asks of the nodes."""

    prompt_ids: tuple[int, ...]
    params: DecodingParams
    cache_salt: bytes = b""


class Legs:
    """Both legs of one attempt, or the decode leg alone. They are under way as soon as this is made."""

    def __init__(
        self,
        sender: ControlSender,
        route: Route,
        handoff_id: bytes,
        attempt: int,
        request: RelayRequest,
        token_ids: tuple[int, ...],
    ) -> None:
        """`token_ids`: the prompt and what was emitted in earlier attempts."""
        self.decode_epoch = route.decode.epoch
        self._sender = sender
        self._cancel = Cancel(handoff_id, attempt)
        self._prefill = route.prefill
        self._decode: Node | None = route.decode
        peer = None
        if route.prefill is not None:
            peer = PrefillPeer(route.prefill.node_id, route.prefill.epoch, route.prefill.hello.peer_address)
            prefill_leg = Prefill(
                handoff_id=handoff_id,
                attempt=attempt,
                token_ids=token_ids,
                num_prompt_tokens=len(request.prompt_ids),
                params=request.params,
                cache_salt=request.cache_salt,
                decode_node_id=route.decode.node_id,
                decode_epoch=route.decode.epoch,
            )
            self._send(route.prefill, prefill_leg)
        decode_leg = Decode(
            handoff_id=handoff_id,
            attempt=attempt,
            token_ids=token_ids,
            num_prompt_tokens=len(request.prompt_ids),
            params=request.params,
            cache_salt=request.cache_salt,
            prefill_peer=peer,
        )
        self._send(route.decode, decode_leg)

    def run_on(self, epoch: int) -> bool:
        """Whether a leg that is not over runs on the node of that epoch."""
        return any(node is not None and node.epoch == epoch for node in (self._prefill, self._decode))

    def end_prefill(self) -> None:
        """The decode node generates, so it has the KV: the prefill leg is over."""
        if self._prefill is not None:
            self._prefill.load -= 1
            self._prefill = None

    def cancel(self) -> None:
        """Whatever still runs is not wanted. Does nothing the second time."""
        for node in (self._prefill, self._decode):
            if node is not None:
                node.load -= 1
                self._sender.send(node.epoch, self._cancel)
        self._prefill = self._decode = None

    def _send(self, node: Node, message: Prefill | Decode) -> None:
        node.load += 1
        # a node that cannot be reached is declared lost soon, which starts the next attempt
        self._sender.send(node.epoch, message)
