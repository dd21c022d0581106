"""Prefixes that this node borrows: blocks of other nodes' prefix caches that are copied into its own.

Owns the handoffs of which this node is the receiver without a request that waits for them. The engine has reserved the
blocks, and the receiving side says when they are verified: then they go into the prefix cache, where the request that
they were copied for finds them, or any other. What is cancelled is released when nothing can be written any more.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from baton.engine.cache.hashing import prompt_digest
from baton.engine.core import EngineCore
from baton.kvtransfer.commands import (
    CancelReceiving,
    Delivered,
    Failed,
    GrantBlocks,
    ReceivingNotice,
    Released,
    ReservedBlocks,
)
from baton.kvtransfer.receiving_end import ReceivingEnd
from baton.node.notices import OtherNotices
from baton.wire.errors import BatonError, InvalidMessage, Overloaded, RequestFailed, TransferFailed
from baton.wire.messages import HandoffFigures, PrefillPeer
from baton.wire.prompt import Prompt
from baton.wire.pulls import Pull
from baton.wire.request_key import RequestKey

MAX_PULLS = 256
"""Prefixes of all routers that are on their way here; more are refused."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A prefix of so many tokens is in the prefix cache now."""

    key: RequestKey
    num_tokens: int
    figures: HandoffFigures


class PrefixBorrower:
    """Takes prefixes by `end` into the prefix cache of `core`. `rest` is what others may use of that end."""

    def __init__(self, core: EngineCore, end: ReceivingEnd) -> None:
        self._core = core
        self._thread = end.thread
        self._prompts: dict[RequestKey, Prompt] = {}
        self._wanted: set[RequestKey] = set()
        self._arrived: list[Arrived] = []
        self._failures: list[tuple[RequestKey, BatonError]] = []
        self._notices = OtherNotices(end.notices, self._prompts.keys(), self._take)
        self.rest = replace(end, notices=self._notices)

    @property
    def keys(self) -> Collection[RequestKey]:
        """What is on its way, wanted or not, until its blocks are released."""
        return self._prompts.keys()

    @property
    def wakeup(self) -> object:
        """The socket that wakes for notices of the receiving side."""
        return self._notices.wakeup

    def begin(self, order: Pull) -> None:
        """Reserve blocks for a prefix and have them written. Raises `BatonError`."""
        key = RequestKey(order.handoff_id, order.attempt)
        if self._core.handoffs.is_used(key):
            raise InvalidMessage("this attempt of the request exists already")
        if len(self._prompts) >= MAX_PULLS:
            raise Overloaded(f"{len(self._prompts)} prefixes are on their way already")
        reservation = self._core.handoffs.reserve(key, order.prompt)
        if reservation is None:
            raise Overloaded("there is no room for a prefix")
        blocks = ReservedBlocks(
            key=key,
            num_tokens=order.prompt.num_tokens,
            num_cached_tokens=reservation.num_cached_tokens,
            prompt_digest=prompt_digest(order.prompt),
            block_ids=reservation.missing_block_ids,
            generations=reservation.missing_generations,
            has_firsts=False,
        )
        self._prompts[key] = order.prompt
        self._wanted.add(key)
        self._thread.post(GrantBlocks(blocks, PrefillPeer(order.node_id, order.epoch, order.address)))

    def cancel(self, key: RequestKey) -> None:
        """Nobody waits for it any more. Harmless when it is unknown."""
        if key in self._wanted:
            self._wanted.remove(key)
            self._thread.post(CancelReceiving(key))

    def cancel_all(self, owner: bytes) -> None:
        """Cancel those whose id begins with `owner`, and report them as failed."""
        for key in [key for key in self._wanted if key.handoff_id.startswith(owner)]:
            self.cancel(key)
            self._failures.append((key, RequestFailed("the router was silent for too long")))

    def poll(self) -> None:
        """Take what has come. Raises `BatonError` when the receiving side has failed."""
        self._thread.require_alive()
        self._notices.sort()

    def take_arrived(self) -> list[Arrived]:
        """What has come since the last call, and somebody waits for."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def take_failures(self) -> list[tuple[RequestKey, BatonError]]:
        """What will not come, since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def _take(self, notice: ReceivingNotice) -> None:
        key = notice.key
        match notice:
            case Delivered():
                prompt = self._prompts.pop(key)
                self._core.handoffs.keep(key, prompt)
                if key in self._wanted:
                    self._wanted.remove(key)
                    self._arrived.append(Arrived(key, prompt.num_tokens, notice.figures))
            case Failed():
                if key in self._wanted:
                    self.cancel(key)
                    self._failures.append((key, TransferFailed(notice.reason)))
            case Released():
                del self._prompts[key]
                self._core.handoffs.release(key)
