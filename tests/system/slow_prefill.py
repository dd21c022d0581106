"""A prefill node whose chunks and pushes take their time: `slow_prefill.py STEP_S PUSH_S MODEL FLAG...`.

A real node in every other way, so that tests can look at, and kill, what is usually over in a millisecond.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from engine.attention.base import LayerStored
from engine.runner.base import RunningStep
from engine.runner.model_runner import ModelRunner
from engine.scheduler.request import Step
from kvtransfer.messages import PeerHello
from kvtransfer.transports.base import Move, Sender
from kvtransfer.transports.registry import SenderFactory
from prefill_node.__main__ import main
from wire.request_key import RequestKey

STEP_S, PUSH_S = float(sys.argv[1]), float(sys.argv[2])
_launch = ModelRunner.launch


class SlowSender:
    """Lets `PUSH_S` pass before each push is taken; what is queued meanwhile can be cancelled."""

    pushes_parts = False
    needs_fence = False

    def __init__(self, sender: Sender) -> None:
        self.is_silent = sender.is_silent
        self.writer = sender.writer
        self.piece_bytes = sender.piece_bytes // 128
        self._sender = sender
        self._next_push_s = 0.0

    def push(self, key: RequestKey, moves: Sequence[Move]) -> bool:
        """See `Sender.push`."""
        now_s = time.monotonic()
        if not self._next_push_s:
            self._next_push_s = now_s + PUSH_S
        if now_s < self._next_push_s:
            return False
        self._next_push_s = 0.0
        return self._sender.push(key, moves)

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


class SlowSenderFactory(SenderFactory):
    """Opens slow senders."""

    def open(self, hello: PeerHello) -> tuple[str, Sender]:
        """See `SenderFactory.open`."""
        transport, sender = SenderFactory.open(self, hello)
        return transport, SlowSender(sender)


@torch.inference_mode()
def launch_slowly(runner: ModelRunner, step: Step, layer_stored: LayerStored | None = None) -> RunningStep:
    """See `Runner.launch`."""
    time.sleep(STEP_S)
    running: RunningStep = _launch(runner, step, layer_stored)
    return running


if __name__ == "__main__":
    slow_pushes = mock.patch("rank_node.driver.SenderFactory", SlowSenderFactory)
    slow_steps = mock.patch.object(ModelRunner, "launch", launch_slowly)
    with slow_pushes, slow_steps:
        sys.exit(main(sys.argv[3:]))
