"""A prefill node whose chunks and pushes take their time: `slow_prefill.py STEP_S PUSH_S MODEL FLAG...`.

A real node in every other way, so that tests can look at, and kill, what is usually over in a millisecond.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from unittest import mock

import torch

from engine.runner.model_runner import ModelRunner
from engine.scheduler.request import RequestKey, SampledToken, Step
from kvtransfer.messages import HandoffKey, PeerHello
from kvtransfer.transports.base import Move, Sender
from kvtransfer.transports.registry import SenderFactory
from prefill_node.__main__ import main

STEP_S, PUSH_S = float(sys.argv[1]), float(sys.argv[2])
_execute = ModelRunner.execute


class SlowSender:
    """Sleeps before each push."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def push(self, key: HandoffKey, moves: Sequence[Move]) -> None:
        """See `Sender.push`."""
        time.sleep(PUSH_S)
        self._sender.push(key, moves)

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
def execute_slowly(runner: ModelRunner, step: Step) -> dict[RequestKey, SampledToken]:
    """See `Runner.execute`."""
    time.sleep(STEP_S)
    tokens: dict[RequestKey, SampledToken] = _execute(runner, step)
    return tokens


if __name__ == "__main__":
    slow_pushes = mock.patch("prefill_node.node.SenderFactory", SlowSenderFactory)
    slow_steps = mock.patch.object(ModelRunner, "execute", execute_slowly)
    with slow_pushes, slow_steps:
        sys.exit(main(sys.argv[3:]))
