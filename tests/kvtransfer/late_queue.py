"""A device that is as late as it may be: nothing is done before somebody waits for it, or has asked often enough.

Whoever uses bytes without having waited finds the old ones, and whoever changes bytes that are still to be copied sends
the new ones: on a device both would go wrong now and then, here they always do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvtransfer.device_pool import DevicePool
from kvtransfer.device_queue import Mark
from kvtransfer.pool import HostPin, Pin
from kvtransfer.transports.base import Blocks


class LateQueue:
    """See `DeviceQueue`. `patience`: how often a mark is asked for before it is passed."""

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

    def mark(self) -> Mark:
        return _LateMark(self, self._num_issued, self._patience)

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
class _LateMark:
    queue: LateQueue
    number: int
    patience: int

    def is_passed(self) -> bool:
        self.patience -= 1
        if self.patience < 0:
            self.queue.do(self.number)
        return self.queue.has_done(self.number)

    def wait(self) -> None:
        self.queue.num_waits += 1
        self.queue.do(self.number)


def late_pool(blocks: Blocks, patience: int = 3) -> DevicePool:
    """`blocks` as a pool in the memory of a late device."""
    return DevicePool(torch.from_numpy(blocks), LateQueue(patience))
