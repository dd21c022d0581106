"""D's side of one pair: a thread that receives one message of the group after another into slots.

Owns the slots and the order of what was received. Never writes the pool: only the transfer thread copies from a slot.

Bounds: `NUM_SLOTS` slots of `piece_bytes` (or one block). A pair ends when the transfer thread does
not release a slot within `STALL_S`.

On a GPU a thread first makes the pool's device its own, and does all its work on one stream: slots are allocated,
filled, and awaited there, so the allocator hands none of them to another stream while it is in use. NCCL's own stream
waits for it before each operation, and `finish` before what follows. A slot passes between this stream and the transfer
thread's only after the one that had it has been waited for.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from typing import Any

import torch

from baton.device.choose import open_stream
from baton.device.stream import bind_thread
from baton.kvtransfer.transports.nccl import line
from baton.kvtransfer.transports.nccl.blocks import NUM_SLOTS, open_slots
from baton.kvtransfer.transports.nccl.group import RECEIVER_RANK, SENDER_RANK, PairStore, finish, form_group, give_up
from baton.kvtransfer.transports.nccl.line import Ended, FromPair, Landed, Line, News, Stopped, begin_thread, reason_of
from baton.kvtransfer.transports.nccl.wire import BlockBatch, StoreEntry


class IncomingPair:
    """D's side of one pair and its thread, which receives one message after another into slots."""

    def __init__(self, connection: bytes, pool: torch.Tensor, host: str, news: News) -> None:
        self.line = Line()
        self.free_slots: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        self.next_number = 0
        self._connection = connection
        self._pool = pool
        self._host = host
        self._news = news
        self._thread = begin_thread(self._run, "kv-pair-in", pool.device)

    def stop(self) -> None:
        """Receive nothing more, and end the pair's thread."""
        self.line.stop()
        self.free_slots.put(None)  # whoever waits for a slot gets none

    @property
    def is_over(self) -> bool:
        """Whether the pair's thread has ended."""
        return not self._thread.is_alive()

    def _tell(self, item: Any) -> None:
        self._news.put(FromPair(self._connection, item))

    def _tell_entry(self, key: str, value: bytes) -> None:
        self._tell(StoreEntry(key, value))

    def _run(self) -> None:
        try:
            bind_thread(self._pool.device)
            with open_stream(self._pool.device).current():
                store = PairStore(self._tell_entry, self.line.take_entry, line.FORM_S)
                group = form_group(store, RECEIVER_RANK, self._host, self._pool.device)
                try:
                    for slot in open_slots(self._pool):
                        self.free_slots.put(slot)
                    self._receive(group)
                finally:
                    give_up(group, self._pool.device)
        except Stopped:
            pass
        except Exception as error:  # the edge of the thread: whatever happened ends the pair
            self._tell(Ended(reason_of(error)))

    def _receive(self, group: Any) -> None:
        heard_s = time.monotonic()
        in_flight: deque[tuple[Any, Landed]] = deque()
        while True:
            item = self.line.take(0.0 if in_flight else line.ALIVE_S)
            if isinstance(item, BlockBatch):
                if len(in_flight) == NUM_SLOTS:
                    self._land(*in_flight.popleft())
                in_flight.append(self._begin(group, item))
            elif item is None and in_flight:
                self._land(*in_flight.popleft())
            elif item is None:
                if time.monotonic() - heard_s > line.SILENCE_S:
                    raise TimeoutError(f"the sender was silent for {line.SILENCE_S:g} s")
                continue
            heard_s = time.monotonic()

    def _begin(self, group: Any, batch: BlockBatch) -> tuple[Any, Landed]:
        try:
            slot = self.free_slots.get(timeout=line.STALL_S)
        except queue.Empty:
            raise TimeoutError(f"the receiver took nothing for {line.STALL_S:g} s") from None
        if slot is None:
            raise Stopped
        # gloo ends the process when more comes than was asked for, and takes less: so the whole slot is asked for
        wanted = slot if slot.is_cpu else slot[: len(batch.block_ids)]
        return group.recv([wanted], SENDER_RANK, 0), Landed(batch, slot)

    def _land(self, work: Any, landed: Landed) -> None:
        finish(work, line.STALL_S, landed.slot.device)
        self._tell(landed)
