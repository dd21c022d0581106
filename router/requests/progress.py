"""Whether a node that knows a request goes on with it: a decode leg that stands still while its node does not.

The bound is in steps of the node, so it follows the node's speed: a request that a decode node computes gets a token
with each of its steps. It is not counted while anything waits at the node, because a preempted request waits too, nor
before the node has sampled anything of the attempt: until then leases bound the handoff.
"""

from __future__ import annotations

from baton.router.nodes.registry import Node

STANDS_S = 10.0
"""For so long at least, so that what the node says of itself is newer than the last token."""
MAX_STEPS = 256


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
