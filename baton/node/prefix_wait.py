"""How long a request waits for a prefix that is on its way here from another node.

Owns the deadline, which moves with what comes: each token that came has spared the node its computing. So whenever the
wait ends, the request is later than by computing all of it by the patience at most, whatever the other node does. What
came by then is used.
"""

from __future__ import annotations

from baton.wire.messages.prefixes import AwaitedPrefix


class PrefixWait:
    """The wait of one request from `now_s` on, until it `is_over`."""

    def __init__(self, order: AwaitedPrefix, now_s: float) -> None:
        self.is_over = False
        self._due_s = now_s + order.patience_s
        self._token_s = order.token_s

    def came(self, num_tokens: int) -> None:
        """So many more tokens of the prefix are in the prefix cache."""
        self._due_s += num_tokens * self._token_s

    def is_late(self, now_s: float) -> bool:
        """Whether computing the rest is better than to go on waiting."""
        return now_s >= self._due_s
