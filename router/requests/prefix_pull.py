"""One pull: before an attempt begins, its prompt's beginning is copied to the node that is to compute it.

The node that has the prefix cached is asked to lend it (`Lend`) and answers how much it still has; then the other one
is asked to take it (`Pull`). When it says that it has it (`Pulled`), the attempt begins there, and finds it cached. A
pull has an attempt number of its own, so nothing that nodes say of it is taken for the attempt's.

A pull that is refused, fails, loses a node, or takes longer than it may, costs nothing but that time: the attempt
begins without it. Owns what was asked of which node, and takes it back at the end. At most one pull is under
way, and there is one for each request at most. Lives on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.router.nodes.registry import Node
from baton.router.requests.attempt import ControlSender
from baton.router.routing.pulls import CANCELLED, FAILED, LATE, REFUSED, PlannedPull, PulledPrefix, PullRecords
from baton.wire.messages import Cancel, HandedOver, live_key
from baton.wire.prompt import Prompt
from baton.wire.pulls import Lend, Pull, Pulled


class PrefixPull:
    """The pull of the request with this handoff id. `begin_attempt` is called when it is over, unless `end` was."""

    def __init__(
        self, handoff_id: bytes, sender: ControlSender, records: PullRecords, begin_attempt: Callable[[], None]
    ) -> None:
        self.prefix: PulledPrefix | None = None
        self.target_epoch = 0
        self._handoff_id, self._sender, self._records = handoff_id, sender, records
        self._begin_attempt = begin_attempt
        self._planned: PlannedPull | None = None
        self._prompt = Prompt(())
        self._number, self._asked_s, self._is_lent = 0, 0.0, False
        self._deadline: asyncio.TimerHandle | None = None

    def num_new_at(self, epoch: int) -> int:
        """Tokens that the node of that epoch has by it."""
        return self.prefix.num_new if self.prefix is not None and epoch == self.target_epoch else 0

    def begin(self, planned: PlannedPull, prompt: Prompt, number: int) -> None:
        """Ask for the beginning of `prompt`, under that number."""
        loop = asyncio.get_running_loop()
        source, target = planned.source, planned.target
        self._planned, self._number, self._asked_s = planned, number, loop.time()
        self._prompt = prompt.first(planned.num_tokens).without_payload()
        self.target_epoch = target.epoch
        for node in (source, target):
            node.live_keys[self._handoff_id] = live_key(self._handoff_id, number)
        lend = Lend(self._handoff_id, number, self._prompt, target.node_id, target.epoch)
        self._sender.send(source.epoch, lend)
        self._deadline = loop.call_later(planned.bound_s, self._give_up, LATE)

    def answered(self, handed: HandedOver, node: Node) -> bool:
        """A node says how much it lends. False when it is not about this pull, or not asked for any more."""
        planned = self._planned
        if planned is None or self._is_lent or handed.attempt != self._number or node is not planned.source:
            return False
        if not planned.num_known < handed.num_tokens <= planned.num_tokens:
            self._give_up(REFUSED)
            return True
        self._is_lent = True
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
        self._begin_attempt()

    def failed(self, attempt: int) -> None:
        """A node says that an attempt failed, maybe this."""
        if attempt == self._number:
            self._give_up(FAILED)

    def lost(self, node: Node) -> None:
        """A node is lost."""
        planned = self._planned
        if planned is not None and (node is planned.source or node is planned.target):
            self._give_up(FAILED)

    def end(self) -> None:
        """The request is over, or wants nothing of it any more."""
        self._take_back(CANCELLED)

    def _give_up(self, result: str) -> None:
        if self._take_back(result):
            self._begin_attempt()

    def _take_back(self, result: str) -> bool:
        """Cancel it at both ends. False when none is under way."""
        planned = self._planned
        if planned is None:
            return False
        self._forget()
        self._records.ended(planned, result, asyncio.get_running_loop().time())
        for node in (planned.source, planned.target):
            self._sender.send(node.epoch, Cancel(self._handoff_id, self._number))
        return True

    def _forget(self) -> None:
        planned, self._planned, self._prompt = self._planned, None, Prompt(())
        if self._deadline is not None:
            self._deadline.cancel()
        for node in () if planned is None else (planned.source, planned.target):
            node.live_keys.pop(self._handoff_id, None)
