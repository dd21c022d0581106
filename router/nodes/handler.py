"""Who is told what nodes say: the other side of `router/nodes/control.py`."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Protocol

from baton.router.nodes.registry import Node
from baton.wire.messages.legs import HandedOver
from baton.wire.messages.output import Failed, PromptRead, Tokens
from baton.wire.messages.prefixes import Pulled


class ControlHandler(Protocol):
    """Handles the messages of nodes, and their loss."""

    def on_tokens(self, tokens: Tokens) -> None:
        """A node sampled these tokens in one step."""
        ...

    def on_prompt_read(self, read: PromptRead) -> None:
        """A node has read some rows of a prompt."""
        ...

    def on_failed(self, failed: Failed, epoch: int) -> None:
        """An attempt ended without finishing."""
        ...

    def on_handed_over(self, handed: HandedOver, node: Node) -> None:
        """A node answers whether it hands a request over."""
        ...

    def on_pulled(self, pulled: Pulled, node: Node) -> None:
        """A node has the prefix that it was to take from another one."""
        ...

    def on_leaving(self, node: Node) -> None:
        """A node gets no more legs, and finishes those that it has."""
        ...

    def on_live(self, node: Node, live: AbstractSet[bytes], received: int) -> None:
        """A node says which attempts it knows, having had every message up to `received`."""
        ...

    def on_node_joined(self, node: Node) -> None:
        """A node can be given legs."""
        ...

    def on_node_lost(self, node: Node, reason: str) -> None:
        """A node is lost, and so are all legs that ran on it."""
        ...
