"""Running requests that this node hands over to other decode nodes, because it leaves.

Owns the handoffs of which this node is the sender: a handoff like that of a prefill node, whose prompt is all that the
engine has computed for a request and whose token 1 is the last one that it has sampled. Nothing is computed for it. The
engine holds the blocks until the sending side says that nobody reads them any more.

A step in flight may still write into the last of these blocks, behind the tokens that are handed over. Checksums are of
whole blocks, so nothing is pushed before that step is over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from prometheus_client.core import Metric

from baton.engine.cache.hashing import prompt_digest
from baton.engine.core import EngineCore
from baton.kvtransfer.commands import BeginHandoff, CancelSending, FinishHandoff, SendingNotice
from baton.kvtransfer.sending_end import SendingEnd
from baton.node.metrics import counters_as_metrics
from baton.wire.messages.legs import HandOver
from baton.wire.messages.output import TokenEvent
from baton.wire.request_key import RequestKey


def nobody(notice: SendingNotice) -> None:
    """Take a notice that nobody waits for: only running requests use the sending side."""


class Source:
    """Hands running requests over to other decode nodes. Used by the engine loop. `pass_on` gets the notices of
    handoffs that are not running requests of this node."""

    def __init__(self, core: EngineCore, end: SendingEnd, pass_on: Callable[[SendingNotice], None] = nobody) -> None:
        self._core = core
        self._end = end
        self._pass_on = pass_on
        self._handoffs: set[RequestKey] = set()
        self._awaiting_steps: list[tuple[int, FinishHandoff]] = []  # how many, and then what

    @property
    def handoffs(self) -> Collection[RequestKey]:
        """The handoffs whose blocks are held here."""
        return self._handoffs

    def wait_on(self) -> Sequence[Any]:
        """The socket that wakes for notices of the sending side."""
        return [self._end.notices.wakeup]

    def hand_over(self, order: HandOver, now_s: float) -> int:
        """End a request, unless it goes on, and begin to hand it over. How many of its tokens have their KV in the
        handoff; 0: nothing has changed, see `Handoffs.hand_over`."""
        key = RequestKey(order.handoff_id, order.next_attempt)
        handed = self._core.handoffs.hand_over(RequestKey(order.handoff_id, order.attempt), key, goes_on=order.goes_on)
        if handed is None:
            return 0
        num_tokens = handed.num_tokens
        self._handoffs.add(key)
        digest = prompt_digest(handed.prompt, handed.output_ids)
        self._end.thread.post(BeginHandoff(key, order.decode_node_id, order.decode_epoch, num_tokens, digest))
        first = TokenEvent(*key, len(handed.output_ids), (handed.next_token_id,), (), "", 0)
        num_drafted = min(num_tokens, self._core.handoffs.num_drafted(handed.block_table))
        finish = FinishHandoff(key, tuple(handed.block_table), (first,), now_s, num_drafted)
        self._awaiting_steps.append((self._core.num_steps_in_flight, finish))
        self._finish_handoffs()
        return num_tokens

    def step_over(self) -> None:
        """The oldest step in flight has been collected: it writes nothing any more."""
        self._awaiting_steps = [(max(0, num_steps - 1), finish) for num_steps, finish in self._awaiting_steps]
        self._finish_handoffs()

    def steps_lost(self) -> None:
        """The steps in flight have failed, and write nothing any more."""
        self._awaiting_steps = [(0, finish) for _, finish in self._awaiting_steps]
        self._finish_handoffs()

    def _finish_handoffs(self) -> None:
        for num_steps, finish in self._awaiting_steps:
            if num_steps == 0:
                self._end.thread.post(finish)
        self._awaiting_steps = [each for each in self._awaiting_steps if each[0]]

    def cancel(self, key: RequestKey) -> None:
        """Cancel a handoff that nobody wants any more. Harmless when it is unknown."""
        if key in self._handoffs:
            self._end.thread.post(CancelSending(key, "cancelled"))

    def poll(self) -> None:
        """Release the blocks of handoffs that are over. Raises `BatonError` when the sending side has failed."""
        self._end.thread.require_alive()
        for notice in self._end.notices.take():
            if notice.key not in self._handoffs:
                self._pass_on(notice)
                continue
            # one that was rejected ends here too: its receiver is told, and it tells the router
            self._handoffs.discard(notice.key)
            self._core.handoffs.release(notice.key)

    def metrics(self) -> Iterable[Metric]:
        """Figures of the sending side."""
        help_text = "Handoffs sent by this node, since its start"
        yield from counters_as_metrics("baton:kv_send_", help_text, asdict(self._end.side.counters))
