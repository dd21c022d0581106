"""Ends of the nccl transport for tests: real ones, a sender made by hand, and programs of their own."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq

from baton.kvtransfer.messages import HandoffName
from baton.kvtransfer.transports.base import Blocks, Move
from baton.kvtransfer.transports.nccl.group import SENDER_RANK, PairStore, finish, form_group
from baton.kvtransfer.transports.nccl.receiver import NcclReceiver
from baton.kvtransfer.transports.nccl.sender import NcclSender
from baton.kvtransfer.transports.nccl.wire import BlockBatch, PairAlive, PairEnd, PairHello, StoreEntry
from baton.wire.codec import Codec
from baton.wire.links import LinkSettings
from baton.wire.request_key import RequestKey
from tests.system.prepared import ROOT, prepared_python

BLOCK_BYTES, NUM_BLOCKS = 4096, 32
GUARD = 0xA5
GENERATION = 3
CPU = torch.device("cpu")
FROM_SENDER = Codec(PairHello, StoreEntry, BlockBatch, PairAlive, PairEnd)
FROM_RECEIVER = Codec(StoreEntry, PairEnd)


def key_of(number: int) -> RequestKey:
    return RequestKey.numbered(number)


def moves_of(sources: Sequence[int], targets: Sequence[int], first_index: int = 0) -> list[Move]:
    return [Move(first_index + i, s, t, GENERATION) for i, (s, t) in enumerate(zip(sources, targets, strict=True))]


class Target:
    """A receiver, its pool, and what has arrived."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str = "127.0.0.1") -> None:
        self.context = context
        self.blocks: Blocks = np.full((NUM_BLOCKS, BLOCK_BYTES), GUARD, dtype=np.uint8)
        self.receiver = NcclReceiver(context, host, self.blocks, LinkSettings())
        self.source = np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        self.num_arrived = 0
        self.senders: list[NcclSender] = []

    def expect(self, number: int, targets: Sequence[int]) -> None:
        self.receiver.expect(key_of(number), targets, [GENERATION] * len(targets))

    def sender(self) -> NcclSender:
        self.senders.append(NcclSender(self.context, self.receiver.endpoint, self.source, LinkSettings()))
        return self.senders[-1]

    def poll(self) -> None:
        self.receiver.poll()
        self.num_arrived += sum(arrival.count for arrival in self.receiver.take_arrivals())

    def until(self, is_done: Callable[[], object], timeout_s: float = 30.0) -> float:
        """Poll until it is done; how long that took."""
        begin_s = time.monotonic()
        while not is_done():
            assert time.monotonic() - begin_s < timeout_s
            self.poll()
            time.sleep(0.0005)
        return time.monotonic() - begin_s

    def push(self, sender: NcclSender, number: int, moves: Sequence[Move]) -> None:
        self.until(lambda: sender.push(key_of(number), moves))

    def is_untouched(self, *written: int) -> bool:
        return bool((np.delete(self.blocks, written, axis=0) == GUARD).all())


class HandMadeSender:
    """The sending side of a pair, message by message."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._link = target.context.socket(zmq.DEALER)
        self._link.connect(target.receiver.endpoint.address)
        self._group: Any = None

    def tell(self, message: object) -> None:
        self._link.send(FROM_SENDER.encode(message))

    def tell_raw(self, *frames: bytes) -> None:
        self._link.send_multipart(frames)

    def hear(self, timeout_s: float = 30.0) -> Any:
        if not self._link.poll(int(timeout_s * 1000)):
            raise TimeoutError
        return FROM_RECEIVER.decode(self._link.recv())

    def _entry(self, timeout_s: float) -> tuple[str, bytes]:
        entry = self.hear(timeout_s)
        return entry.key, entry.value

    def form(self) -> HandMadeSender:
        self.tell(PairHello("gloo", BLOCK_BYTES))
        thread = threading.Thread(target=self._form)
        thread.start()
        self._target.until(lambda: not thread.is_alive())
        assert self._group is not None
        return self

    def _form(self) -> None:
        self._store = PairStore(lambda key, value: self.tell(StoreEntry(key, value)), self._entry, 5)
        self._group = form_group(self._store, SENDER_RANK, "127.0.0.1", CPU)

    def announce(self, number: int, targets: Sequence[int], handoff: int = 1, generation: int = GENERATION) -> None:
        name = HandoffName(*key_of(handoff))
        self.tell(BlockBatch(number, name, 0, tuple(targets), (generation,) * len(targets)))

    def send(self, num_blocks: int, value: int = 7) -> None:
        payload = torch.full((num_blocks * BLOCK_BYTES,), value, dtype=torch.uint8)
        work = self._group.send([payload], 0, 0)
        thread = threading.Thread(target=lambda: finish(work, 5, CPU))
        thread.start()
        self._target.until(lambda: not thread.is_alive())

    def close(self) -> None:
        self._group = None
        self._link.close(linger=0)


class ForkedProgram:
    """A program in a process of its own, forked from one that has imported the transport; `read_line` reads what it
    prints."""

    def __init__(self, source: str, arguments: Sequence[str], folder: Path) -> None:
        path = folder / "program.py"
        path.write_text(source)
        out, into = os.pipe()
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        python = prepared_python("baton.kvtransfer.transports.nccl.receiver", "baton.kvtransfer.transports.nccl.sender")
        with open(into, "wb") as theirs, (folder / "err").open("wb") as err:
            self.process = python.start([str(path), *arguments], environment, theirs, err)
        self._out = open(out)  # noqa: SIM115

    def read_line(self) -> str:
        """A line of its output."""
        return self._out.readline()

    def close(self) -> None:
        """Kill it."""
        self.process.kill()
        self._out.close()


@contextmanager
def program(source: str, *arguments: str) -> Iterator[ForkedProgram]:
    with tempfile.TemporaryDirectory() as folder, closing(ForkedProgram(source, arguments, Path(folder))) as child:
        yield child


def push_until(sender: NcclSender, is_done: Callable[[int], bool], timeout_s: float = 30.0) -> None:
    """Push without end."""
    deadline_s = time.monotonic() + timeout_s
    num_pushed = 0
    while not is_done(num_pushed):
        assert time.monotonic() < deadline_s
        if sender.push(key_of(1), moves_of(range(8), range(8))):
            num_pushed += 1
        else:
            sender.poll()
            time.sleep(0.001)
