"""What is known of the slots of a head, request by request: how many are stored, and the model's hidden states of those
behind them.

A slot is made of the hidden state at its place and of the token behind it. The newest token of a request is known only
after the step that gave the hidden state, so a slot is stored when its request is drafted for next. Steps that the head
has not followed leave a gap: nothing is known of the hidden states there. The slots of a gap are stored with their own
tokens, and the first hidden state behind them in the place of theirs. Half of such an entry is right, and one left as
it was would be another request's.

Bounded: of a request the newest hidden states are kept, and of all requests those that were told of last.

Letters: R rows, E hidden size of the head, K streams of the model that it reads, S hidden size of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from baton.wire.request_key import RequestKey

MOST_ROWS = 64
"""Of a request that are kept. One that rests goes on without drafts for as many tokens at most."""
MOST_FILLED = MOST_ROWS
"""Slots of a gap: those before them stay as they are."""


class SlotRows(NamedTuple):
    """Slots to be stored, from `first` on, and what the head reads of the model there [R, K S]."""

    first: int
    streams: Tensor


@dataclass(slots=True)
class _Slots:
    """`state` [1, E]: the head's own hidden state of the last stored slot. `waiting`: hidden states of slots from
    `first` on, which are not stored yet."""

    num_stored: int
    state: Tensor | None = None
    first: int = 0
    waiting: list[Tensor] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.first + sum(map(len, self.waiting))

    def cut(self, stop: int) -> None:
        """Forget the hidden states of slots from `stop` on: what was computed there was a wrong draft."""
        while self.waiting and self.stop > stop:
            kept = len(self.waiting[-1]) - (self.stop - stop)
            last = self.waiting.pop()
            if kept > 0:
                self.waiting.append(last[:kept])


class HeadSlots:
    """Of at most `max_requests` requests."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._by_key: dict[RequestKey, _Slots] = {}

    def stored(self, key: RequestKey, num_stored: int, state: Tensor) -> None:
        """The first `num_stored` slots are stored, and the head's state of the last one is `state` [1, E]."""
        self._put(key, _Slots(num_stored, state, num_stored))

    def wait(self, key: RequestKey, first: int, streams: Tensor) -> None:
        """The slots from `first` on have these hidden states [R, K S]: as many of them as their request goes on
        with."""
        found = self._by_key.get(key) or _Slots(first)
        found.cut(first)
        found.num_stored = min(found.num_stored, first)
        if not found.waiting or found.stop != first:
            found.first, found.waiting = first, []
        found.waiting.append(streams)
        while len(found.waiting) > 1 and found.stop - found.first > MOST_ROWS:
            found.first += len(found.waiting.pop(0))
        found.state = None
        self._put(key, found)

    def state(self, key: RequestKey, num_slots: int) -> Tensor | None:
        """The head's state [1, E] of the last of `num_slots` slots, where all of them are stored."""
        found = self._by_key.get(key)
        return None if found is None or found.num_stored != num_slots else found.state

    def rows(self, key: RequestKey, num_slots: int) -> SlotRows | None:
        """What has to be stored for the first `num_slots` slots to be. None where the last one's state is not known."""
        found = self._by_key.get(key)
        if found is None or not max(found.first, found.num_stored) < num_slots <= found.stop:
            return None
        streams = torch.cat(found.waiting)[: num_slots - found.first]
        gap = min(found.first - found.num_stored, MOST_FILLED)
        if gap < 0:
            return SlotRows(found.num_stored, streams[-gap:])
        return SlotRows(found.first - gap, torch.cat((streams[:1].expand(gap, -1), streams)) if gap else streams)

    def forget(self, key: RequestKey) -> None:
        """The request has left, or begins again."""
        self._by_key.pop(key, None)

    def _put(self, key: RequestKey, slots: _Slots) -> None:
        self._by_key.pop(key, None)
        self._by_key[key] = slots
        if len(self._by_key) > self._max_requests:
            del self._by_key[next(iter(self._by_key))]
