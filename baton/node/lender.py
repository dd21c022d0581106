"""Prefixes that this node lends: blocks of its prefix cache that another node copies.

Owns the handoffs of which this node is the sender without any request: a handoff like that of a prefill node, whose
prompt is what is cached and whose KV is there already. The engine holds the blocks until the sending side says that
nobody reads them any more. A borrower that never asks costs a lease.

Blocks in the prefix cache are full, and the steps that wrote them are over, so they are pushed at once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from baton.engine.cache.hashing import prompt_digest
from baton.engine.core import EngineCore
from baton.kvtransfer.commands import BeginHandoff, CancelSending, FinishHandoff, SendingNotice
from baton.kvtransfer.sending_end import SendingEnd
from baton.node.notices import OtherNotices
from baton.wire.messages.prefixes import Lend
from baton.wire.request_key import RequestKey

MAX_LENT = 256
"""Prefixes that are lent at once; others are not, and their requests compute them."""


class PrefixLender:
    """Lends what is in the prefix cache of `core`, by `end`. `rest` is what others may use of that end."""

    def __init__(self, core: EngineCore, end: SendingEnd) -> None:
        self._core = core
        self._thread = end.thread
        self._lent: set[RequestKey] = set()
        self._notices = OtherNotices(end.notices, self._lent, self._released)
        self.rest = replace(end, notices=self._notices)

    @property
    def keys(self) -> Collection[RequestKey]:
        """What is lent now."""
        return self._lent

    def lend(self, order: Lend, now_s: float) -> int:
        """Hold what is cached of the beginning of that prompt, and begin to hand it over. How many tokens; 0: none."""
        key = RequestKey(order.handoff_id, order.attempt)
        block_table = self._core.handoffs.lend(key, order.prompt) if len(self._lent) < MAX_LENT else None
        if not block_table:
            return 0
        num_tokens = len(block_table) * self._core.limits.block_size
        self._lent.add(key)
        digest = prompt_digest(order.prompt.first(num_tokens))
        self._thread.post(BeginHandoff(key, order.node_id, order.epoch, num_tokens, digest))
        self._thread.post(FinishHandoff(key, tuple(block_table), (), now_s))
        return num_tokens

    def cancel(self, key: RequestKey) -> None:
        """Lend it no longer. Harmless when it is unknown."""
        if key in self._lent:
            self._thread.post(CancelSending(key, "cancelled"))

    def poll(self) -> None:
        """Release what nobody copies any more. Raises `BatonError` when the sending side has failed."""
        self._thread.require_alive()
        self._notices.sort()

    def _released(self, notice: SendingNotice) -> None:
        # one that was rejected ends here too: the borrower's grant is answered with `Revoked`
        self._lent.discard(notice.key)
        self._core.handoffs.release(notice.key)
