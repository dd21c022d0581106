"""A prefill node whose chunks or pushes never end: `slow_prefill.py NUM_STEPS NUM_PUSHES PUSH_S MODEL FLAG...`.

It computes so many chunks and takes so many blocks, each after PUSH_S; behind them, nothing, and it says so. A real
node in every other way, so that tests can look at, and kill, what is usually over in a millisecond.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from baton.engine.attention.base import LayerStored
from baton.engine.runner.base import RunningStep
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.scheduler.step import Step
from baton.kvtransfer.messages import PeerHello
from baton.kvtransfer.transports.base import Move, Sender
from baton.kvtransfer.transports.registry import SenderFactory
from baton.prefill_node.__main__ import main
from baton.wire.request_key import OWNER_BYTES, RequestKey

NUM_STEPS, NUM_PUSHES, PUSH_S = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
NO_MORE = "there will be no more\n"
NEVER_S = 600.0
CONNECTS_S = 30.0
_is_connected, _steps = threading.Event(), itertools.count()
_launch = ModelRunner.launch


class FullSender:
    """Takes no push behind the first ones; what is queued meanwhile can be cancelled."""

    pushes_parts = False
    needs_fence = False

    def __init__(self, sender: Sender) -> None:
        self.is_silent = sender.is_silent
        self.writers = sender.writers
        self.piece_bytes = 1  # a block at a time
        self._sender = sender
        self._num_left = NUM_PUSHES
        self._next_push_s = 0.0

    def push(self, key: RequestKey, moves: Sequence[Move]) -> bool:
        """See `Sender.push`."""
        if not self._num_left:
            sys.stderr.write(NO_MORE)
            return False
        now_s = time.monotonic()
        self._next_push_s = self._next_push_s or now_s + PUSH_S
        if now_s < self._next_push_s:
            return False
        self._next_push_s = 0.0
        is_taken = self._sender.push(key, moves)
        self._num_left -= is_taken
        return is_taken

    def push_part(self, key: RequestKey, moves: Sequence[Move], begin_byte: int, end_byte: int) -> None:
        """See `Sender.push_part`."""
        self._sender.push_part(key, moves, begin_byte, end_byte)

    def poll(self) -> None:
        """See `Sender.poll`."""
        self._sender.poll()

    def wait_on(self) -> Sequence[Any]:
        """See `Sender.wait_on`."""
        return self._sender.wait_on()

    def is_reading(self, key: RequestKey) -> bool:
        """See `Sender.is_reading`."""
        return self._sender.is_reading(key)

    def close(self) -> None:
        """See `Sender.close`."""
        self._sender.close()


class FullSenderFactory(SenderFactory):
    """Opens such senders."""

    def open(self, hello: PeerHello) -> tuple[str, Sender]:
        """See `SenderFactory.open`."""
        transport, sender = SenderFactory.open(self, hello)
        _is_connected.set()
        return transport, FullSender(sender)


@torch.inference_mode()
def launch_some(runner: ModelRunner, step: Step, layer_stored: LayerStored | None = None) -> RunningStep:
    """See `Runner.launch`."""
    is_asked = step.shares[0].key.handoff_id[:OWNER_BYTES] != bytes(OWNER_BYTES)  # not a step of the node's start
    if is_asked and next(_steps) == NUM_STEPS:
        _is_connected.wait(CONNECTS_S)  # all chunks may be computed before the decode node is there
        sys.stderr.write(NO_MORE)
        time.sleep(NEVER_S)
    running: RunningStep = _launch(runner, step, layer_stored)
    return running


if __name__ == "__main__":
    full_senders = mock.patch("baton.ranks.handoff_ends.SenderFactory", FullSenderFactory)
    few_steps = mock.patch.object(ModelRunner, "launch", launch_some)
    with full_senders, few_steps:
        sys.exit(main(sys.argv[4:]))
