"""Between the transfer thread and the threads of the "nccl" transport, one for each pair and side, which may wait.

Owns the deadlines of those threads and what passes between them and the transfer thread: messages of the peer come
through a `Line`; messages to send, and news, leave through a mailbox. Knows no sockets and no groups.

Each wait has a deadline, and a thread ends when the main thread of its process has.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from baton.kvtransfer.mailbox import Mailbox
from baton.kvtransfer.transports.nccl.wire import BlockBatch, StoreEntry

FORM_S = 10.0
STALL_S = 5.0
ALIVE_S = 1.0
SILENCE_S = 8.0


class Stopped(Exception):
    """The transfer thread has ended this pair."""


class Line:
    """The items that the transfer thread, which owns the sockets, gives to the thread of one pair, which may wait."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._early: deque[Any] = deque()
        self._is_stopped = False

    def put(self, item: Any) -> None:
        """Add an item. Called by the transfer thread."""
        self._items.put(item)

    def stop(self) -> None:
        """End the line; items that are still in it are dropped. Called by the transfer thread."""
        self._is_stopped = True
        self._items.put(None)

    def __len__(self) -> int:
        return self._items.qsize()

    def take(self, timeout_s: float) -> Any | None:
        """The next item, None after `timeout_s`. Raises `Stopped`."""
        item: Any | None = None
        if self._early:
            item = self._early.popleft()
        else:
            with contextlib.suppress(queue.Empty):
                item = self._items.get(timeout=timeout_s) if timeout_s > 0 else self._items.get_nowait()
        # nobody is left to stop this pair once the process's main thread has ended
        if self._is_stopped or not threading.main_thread().is_alive():
            raise Stopped
        return item

    def take_entry(self, timeout_s: float) -> tuple[str, bytes]:
        """The next `StoreEntry`; other items wait until the group stands. Raises `Stopped`, and `TimeoutError` after
        `timeout_s` seconds."""
        deadline_s = time.monotonic() + timeout_s
        early: list[Any] = []
        try:
            while (remaining_s := deadline_s - time.monotonic()) > 0:
                item = self.take(min(remaining_s, ALIVE_S))
                if isinstance(item, StoreEntry):
                    return item.key, item.value
                if item is not None:
                    early.append(item)
        finally:
            self._early.extend(early)
        raise TimeoutError("the peer did not form the group in time")


@dataclass(frozen=True, slots=True)
class FromPair:
    """An item that the thread of a pair gives to the transfer thread: a message to send, or news."""

    connection: bytes
    item: Any


News: TypeAlias = Mailbox[FromPair]


@dataclass(frozen=True, slots=True)
class Ended:
    """The pair's thread has ended."""

    reason: str


@dataclass(frozen=True, slots=True)
class Landed:
    """The blocks of `batch` lie in `slot`."""

    batch: BlockBatch
    slot: torch.Tensor


@dataclass(frozen=True, slots=True)
class Standing:
    """The group is formed."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A message has left: there is room for another."""


def reason_of(error: Exception) -> str:
    # torch's texts begin with a place in its source, and what NCCL itself has to say comes last
    text = str(error).rpartition("Last error:")[2].strip() or str(error)
    return f"{type(error).__name__}: {text.split('] ', 1)[-1]:.200}"


def begin_thread(run: Callable[[], None], name: str, device: torch.device) -> threading.Thread:
    """A thread for one pair. NCCL may not come back: then its thread must not keep the process, but go with it."""
    thread = threading.Thread(target=run, name=name, daemon=device.type == "cuda")
    thread.start()
    return thread
