"""Two pools with a nixl receiver over one and nixl senders over the other, both in this process."""

from __future__ import annotations

import itertools
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

import numpy as np
import pytest

from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.transports.base import Move
from baton.kvtransfer.transports.inlets import WholeOnly
from baton.kvtransfer.transports.nixl.process import AgentProcess
from baton.kvtransfer.transports.nixl.receiver import NixlDeviceReceiver, NixlReceiver
from baton.kvtransfer.transports.nixl.sender import NixlSender, NixlSenders
from baton.kvtransfer.transports.nixl.thread import AgentThread
from baton.kvtransfer.transports.shm.segment import Segment
from baton.wire.errors import TransferFailed
from baton.wire.request_key import RequestKey

GENERATION = 7
needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
_keys = itertools.count(1)


@contextmanager
def preserved_environment() -> Iterator[None]:
    """What a node puts into its environment stays there, but the tests' process is nobody's node.

    A fixture of a wider scope needs it too: what it leaves behind would choose the network of every later agent.
    """
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


class NixlPair:
    """`source` and `target` are [num_blocks, block_bytes]; the source holds noise.

    `on_threads`: whose agent is a thread of this process, (the senders', the receiver's).
    """

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        host: str = "127.0.0.1",
        *,
        on_threads: tuple[bool, bool] = (False, False),
    ) -> None:
        self._segments = [Segment(num_blocks * block_bytes) for _ in range(2)]
        self.source, self.target = (segment.array.reshape(num_blocks, block_bytes) for segment in self._segments)
        self.source[:] = np.random.default_rng(0).integers(0, 256, self.source.shape, dtype=np.uint8)
        self.target[:] = 0
        self.num_blocks = num_blocks
        sends, receives = on_threads
        inlets = WholeOnly(HostPool(self.target))
        self.receiver = (
            NixlDeviceReceiver(AgentThread(self.target, host), inlets)
            if receives
            else NixlReceiver(AgentProcess(self._segments[1].descriptor, num_blocks, block_bytes, host), inlets)
        )
        self.senders = NixlSenders(
            AgentThread(self.source, host)
            if sends
            else AgentProcess(self._segments[0].descriptor, num_blocks, block_bytes, host),
            block_bytes,
        )

    def open(self) -> NixlSender:
        """A sender to the receiver, once both agents are up."""
        self.wait_until(lambda: bool(self.receiver.endpoint.details) and self.senders.process is not None)
        return self.senders.open(self.receiver.endpoint, self.num_blocks)

    def expect(self, moves: Sequence[Move]) -> RequestKey:
        """A new handoff whose grant is these moves' targets."""
        key = RequestKey.numbered(next(_keys))
        self.receiver.expect(key, [move.target for move in moves], [move.generation for move in moves])
        return key

    def push(self, sender: NixlSender, key: RequestKey, moves: Sequence[Move]) -> int:
        """Push, and wait until it is over on both sides; how many blocks arrived."""
        assert sender.push(key, moves)
        num_arrived = 0

        def is_over() -> bool:
            nonlocal num_arrived
            num_arrived += sum(a.count for a in self.receiver.take_arrivals() if a.key == key)
            sender.poll()
            return num_arrived >= len(moves) and not sender.is_reading(key)

        self.wait_until(is_over)
        return num_arrived

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float = 40.0) -> float:
        """Poll both ends until `is_so`; returns after how many seconds."""
        began_s = time.monotonic()
        while not is_so():
            if time.monotonic() - began_s > timeout_s:
                raise TimeoutError("it did not happen")
            select.select([*self.receiver.wait_on(), *self.senders.wait_on()], [], [], 0.01)
            self.receiver.poll()
            self.senders.poll()
        return time.monotonic() - began_s

    def wait_for_failure(self, sender: NixlSender, timeout_s: float = 40.0) -> str:
        """Poll until the sender fails; why."""
        reasons: list[str] = []

        def has_failed() -> bool:
            try:
                sender.poll()
            except TransferFailed as error:
                reasons.append(str(error))
            return bool(reasons)

        self.wait_until(has_failed, timeout_s)
        return reasons[0]

    def close(self) -> None:
        """Processes and segments go."""
        self.receiver.close()
        self.senders.close()
        for segment in self._segments:
            segment.close()


def moves_of(sources: Sequence[int], targets: Sequence[int]) -> list[Move]:
    """Moves in grant order."""
    pairs = enumerate(zip(sources, targets, strict=True))
    return [Move(index, source, target, GENERATION) for index, (source, target) in pairs]
