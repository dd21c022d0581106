"""A device that is as late as it may be: nothing is done before somebody waits for it, or has asked often enough.

Whoever uses bytes without having waited finds the old ones, and whoever changes bytes that are still to be copied sends
the new ones: on a device both would go wrong now and then, here they always do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.device.events import Event
from baton.device.pinning import HostPin, Pin
from baton.kvtransfer.pools.device import DevicePool
from baton.kvtransfer.transports.base import Blocks


class LateStream:
    """See `Stream`. `patience`: how often an event is asked for before it is passed."""

    def __init__(self, patience: int = 3) -> None:
        self.num_waits = 0
        self.threads: list[int] = []
        self._patience = patience
        self._issued: deque[Callable[[], None]] = deque()
        self._num_issued = 0
        self._num_done = 0

    @property
    def num_left(self) -> int:
        """What was issued and has not happened."""
        return len(self._issued)

    def enter(self) -> None:
        self.threads.append(threading.get_ident())

    def copy(self, target: Tensor, source: Tensor) -> None:
        def work() -> None:
            target.copy_(source)

        self.run(work)

    def run(self, work: Callable[[], None]) -> None:
        self._issued.append(work)
        self._num_issued += 1

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def record_event(self) -> Event:
        return _LateEvent(self, self._num_issued, self._patience)

    def synchronize(self) -> None:
        self.record_event().wait(0.0)

    def host_memory(self, num_bytes: int) -> Blocks:
        return np.full(num_bytes, 0xDD, dtype=np.uint8)

    def pin(self, region: Blocks) -> Pin:
        return HostPin()

    def has_done(self, number: int) -> bool:
        return self._num_done >= number

    def do(self, number: int) -> None:
        """Everything up to that number."""
        while self._num_done < number:
            self._issued.popleft()()
            self._num_done += 1


@dataclass(slots=True)
class _LateEvent:
    stream: LateStream
    number: int
    patience: int

    def is_passed(self) -> bool:
        self.patience -= 1
        if self.patience < 0:
            self.stream.do(self.number)
        return self.stream.has_done(self.number)

    def wait(self, timeout_s: float) -> None:
        self.stream.num_waits += 1
        self.stream.do(self.number)


def late_pool(blocks: Blocks, patience: int = 3) -> DevicePool:
    """`blocks` as a pool in the memory of a late device."""
    return DevicePool(torch.from_numpy(blocks), LateStream(patience))
