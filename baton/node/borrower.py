"""Prefixes that this node borrows: blocks of other nodes' prefix caches that are copied into its own.

Owns the handoffs of which this node is the receiver without a request of its own behind them. The engine has reserved
the blocks, and the receiving side says when the first of them are verified, or all: they go into the prefix cache at
once, where the request that they were copied for finds them, or any other. What is cancelled is released when nothing
can be written any more; what has come until then stays.

Owns also how long requests wait for them (`baton.node.prefix_wait`). A wait ends with its pull, and a pull with its
wait, whatever becomes of the router meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from baton.engine.cache.hashing import prompt_digest
from baton.engine.core import EngineCore
from baton.engine.held_blocks import Reservation
from baton.kvtransfer.commands import (
    CancelReceiving,
    Delivered,
    Failed,
    GrantBlocks,
    ReceivingNotice,
    Released,
    ReservedBlocks,
    Verified,
)
from baton.kvtransfer.receiving_end import ReceivingEnd
from baton.node.notices import OtherNotices
from baton.node.prefix_wait import PrefixWait
from baton.wire.errors import (
    BatonError,
    DeadlineExceeded,
    InvalidMessage,
    Overloaded,
    RequestFailed,
    TransferFailed,
)
from baton.wire.messages.legs import PrefillPeer
from baton.wire.messages.output import HandoffFigures
from baton.wire.messages.prefixes import AwaitedPrefix, Pull
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey

MAX_PULLS = 256
"""Prefixes of all routers that are on their way here; more are refused."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A prefix of so many tokens is in the prefix cache now."""

    key: RequestKey
    num_tokens: int
    figures: HandoffFigures


@dataclass(slots=True)
class _Borrowed:
    """The blocks for a prefix, of which the first `num_blocks` are in the prefix cache, and `num_known_blocks` were
    there before."""

    prompt: Prompt
    reservation: Reservation
    num_known_blocks: int
    num_blocks: int


class PrefixBorrower:
    """Takes prefixes by `end` into the prefix cache of `core`. `rest` is what others may use of that end."""

    def __init__(self, core: EngineCore, end: ReceivingEnd) -> None:
        self._core = core
        self._thread = end.thread
        self._borrowed: dict[RequestKey, _Borrowed] = {}
        self._waits: dict[RequestKey, PrefixWait] = {}
        self._wanted: set[RequestKey] = set()
        self._arrived: list[Arrived] = []
        self._failures: list[tuple[RequestKey, BatonError]] = []
        self._notices = OtherNotices(end.notices, self._borrowed.keys(), self._take)
        self.rest = replace(end, notices=self._notices)

    @property
    def keys(self) -> Collection[RequestKey]:
        """What is on its way, wanted or not, until its blocks are released."""
        return self._borrowed.keys()

    @property
    def wakeup(self) -> object:
        """The socket that wakes for notices of the receiving side."""
        return self._notices.wakeup

    def hold_back(self, request: RequestKey, order: AwaitedPrefix, now_s: float) -> None:
        """A request that has just been added waits for a prefix, which is about to be borrowed for it."""
        wait = self._waits[RequestKey(request.handoff_id, order.attempt)] = PrefixWait(order, now_s)
        self._core.hold_back(request, wait)

    def begin(self, order: Pull) -> None:
        """Reserve blocks for a prefix and have them written. Raises `BatonError`."""
        key = RequestKey(order.handoff_id, order.attempt)
        try:
            self._reserve(key, order)
        except BatonError:
            self._end_wait(key)
            raise

    def _reserve(self, key: RequestKey, order: Pull) -> None:
        if self._core.handoffs.is_used(key):
            raise InvalidMessage("this attempt of the request exists already")
        if len(self._borrowed) >= MAX_PULLS:
            raise Overloaded(f"{len(self._borrowed)} prefixes are on their way already")
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
        num_known_blocks = len(reservation.block_table) - len(reservation.missing_block_ids)
        self._borrowed[key] = _Borrowed(order.prompt, reservation, num_known_blocks, num_known_blocks)
        self._wanted.add(key)
        self._thread.post(GrantBlocks(blocks, PrefillPeer(order.node_id, order.epoch, order.address)))

    def cancel(self, key: RequestKey) -> None:
        """Nobody waits for it any more. Harmless when it is unknown."""
        self._end_wait(key)
        if key in self._wanted:
            self._wanted.remove(key)
            self._thread.post(CancelReceiving(key))

    def cancel_all(self, owner: bytes) -> None:
        """Cancel those whose id begins with `owner`, and report them as failed."""
        for key in [key for key in self._wanted | self._waits.keys() if key.handoff_id.startswith(owner)]:
            self.cancel(key)
            self._failures.append((key, RequestFailed("the router was silent for too long")))

    def poll(self, now_s: float) -> None:
        """Take what has come, and end the waits that are no use any more. Raises `BatonError` when the receiving side
        has failed."""
        self._thread.require_alive()
        self._notices.sort()
        for key in [key for key, wait in self._waits.items() if wait.is_late(now_s)]:
            self.cancel(key)
            self._failures.append((key, DeadlineExceeded("the rest of the prefix is computed sooner than it comes")))

    def take_arrived(self) -> list[Arrived]:
        """What has come since the last call, and somebody waits for."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def take_failures(self) -> list[tuple[RequestKey, BatonError]]:
        """What will not come, since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def _take(self, notice: ReceivingNotice) -> None:
        key, borrowed = notice.key, self._borrowed[notice.key]
        match notice:
            case Verified():
                self._publish(borrowed, borrowed.num_known_blocks + notice.num_blocks)
            case Delivered():
                self._publish(borrowed, len(borrowed.reservation.hashes))
                del self._borrowed[key]
                self._core.handoffs.release(key)
                self._end_wait(key)
                if key in self._wanted:
                    self._wanted.remove(key)
                    self._arrived.append(Arrived(key, borrowed.prompt.num_tokens, notice.figures))
            case Failed():
                if key in self._wanted:
                    self.cancel(key)
                    self._failures.append((key, TransferFailed(notice.reason)))
            case Released():
                del self._borrowed[key]
                self._core.handoffs.release(key)

    def _publish(self, borrowed: _Borrowed, num_blocks: int) -> None:
        """So many blocks of a prefix have come."""
        blocks = range(borrowed.num_blocks, min(num_blocks, len(borrowed.reservation.hashes)))
        self._core.handoffs.publish(borrowed.reservation, borrowed.prompt, blocks)
        borrowed.num_blocks = blocks.stop
        wait = self._waits.get(borrowed.reservation.key)
        if wait is not None:
            wait.came(len(blocks) * self._core.limits.block_size)

    def _end_wait(self, key: RequestKey) -> None:
        wait = self._waits.pop(key, None)
        if wait is not None:
            wait.is_over = True
