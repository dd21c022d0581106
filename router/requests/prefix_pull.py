"""One pull: while a prompt stands in the queue of a node, its beginning is copied there from another one.

The node that has the prefix cached is asked to lend it (`Lend`) and answers how much it still has; then the other one
is asked to take it (`Pull`). That one has the legs of the attempt already, and holds the prompt back until it has the
prefix, or takes longer than it may (`AwaitedPrefix`). A pull has an attempt number of its own, so nothing that nodes
say of it is taken for the attempt's.

A pull that is refused, fails, loses its holder, or is late, costs nothing but that time: the node computes what has not
come. Owns what was asked of which node, and takes it back at the end. At most one pull is under way, and there is one
for each request at most. Lives on one event loop.
"""

from __future__ import annotations

import asyncio

from baton.router.nodes.registry import Node
from baton.router.requests.attempt import ControlSender
from baton.router.routing.pulls import CANCELLED, FAILED, LATE, REFUSED, PlannedPull, PulledPrefix, PullRecords
from baton.wire.errors import DeadlineExceeded
from baton.wire.messages.legs import Cancel, HandedOver
from baton.wire.messages.membership import live_key
from baton.wire.messages.output import Failed
from baton.wire.messages.prefixes import Lend, Pull, Pulled
from baton.wire.prompt import Prompt


class PrefixPull:
    """The pull of the request with this handoff id."""

    def __init__(self, handoff_id: bytes, sender: ControlSender, records: PullRecords) -> None:
        self.prefix: PulledPrefix | None = None
        self.tokens = range(0)
        """Those of the prompt that the node of the current attempt was asked to take."""
        self._handoff_id, self._sender, self._records = handoff_id, sender, records
        self._planned: PlannedPull | None = None
        self._prompt = Prompt(())
        self._number, self._asked_s, self._is_lent = 0, 0.0, False
        self._deadline: asyncio.TimerHandle | None = None

    def begin(self, planned: PlannedPull, prompt: Prompt, number: int) -> None:
        """Ask for the beginning of `prompt`, under that number. Its legs have been sent."""
        loop = asyncio.get_running_loop()
        source, target = planned.source, planned.target
        self._planned, self._number, self._asked_s = planned, number, loop.time()
        self._prompt = prompt.first(planned.num_tokens).without_payload()
        # a node that has a leg is looked after because of that
        source.live_keys.setdefault(self._handoff_id, live_key(self._handoff_id, number))
        lend = Lend(self._handoff_id, number, self._prompt, target.node_id, target.epoch)
        self._sender.send(source.epoch, lend)
        self._deadline = loop.call_later(planned.bound_s, self._take_back, LATE)

    def answered(self, handed: HandedOver, node: Node) -> bool:
        """A node says how much it lends. False when it is not about this pull, or not asked for any more."""
        planned = self._planned
        if planned is None or self._is_lent or handed.attempt != self._number or node is not planned.source:
            return False
        if not planned.num_known < handed.num_tokens <= planned.num_tokens:
            self._take_back(REFUSED)
            return True
        self._is_lent = True
        self.tokens = range(planned.num_known, handed.num_tokens)
        prompt = self._prompt.first(handed.num_tokens)
        pull = Pull(self._handoff_id, self._number, prompt, node.node_id, node.epoch, node.hello.peer_address)
        self._sender.send(planned.target.epoch, pull)
        return True

    def arrived(self, pulled: Pulled, node: Node) -> None:
        """A node says that it has the prefix."""
        planned = self._planned
        if planned is None or pulled.attempt != self._number or node is not planned.target or not self._is_lent:
            return
        took_s = asyncio.get_running_loop().time() - self._asked_s
        self._forget()
        self.prefix = self._records.arrived(planned, pulled, took_s)

    def failed(self, failed: Failed) -> None:
        """A node says that an attempt failed, maybe this."""
        if failed.attempt == self._number:
            self._take_back(LATE if failed.code == DeadlineExceeded.code else FAILED)

    def lost(self, node: Node) -> None:
        """A node is lost."""
        planned = self._planned
        if planned is not None and (node is planned.source or node is planned.target):
            self._take_back(FAILED)

    def end(self) -> None:
        """The attempt is over, or wants nothing of it any more."""
        self.tokens = range(0)
        self._take_back(CANCELLED)

    def _take_back(self, result: str) -> None:
        """Cancel it at both ends, if one is under way."""
        planned = self._planned
        if planned is None:
            return
        self._forget()
        self._records.ended(planned, result, asyncio.get_running_loop().time())
        for node in (planned.source, planned.target):
            self._sender.send(node.epoch, Cancel(self._handoff_id, self._number))

    def _forget(self) -> None:
        planned, self._planned, self._prompt = self._planned, None, Prompt(())
        if self._deadline is not None:
            self._deadline.cancel()
        if planned is not None:
            keys, own = planned.source.live_keys, live_key(self._handoff_id, self._number)
            if keys.get(self._handoff_id) == own:
                del keys[self._handoff_id]
