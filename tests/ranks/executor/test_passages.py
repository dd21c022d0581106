"""Passages between stages: steps in their order, and an end of one process that the other notices."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import torch

from baton.engine.executor.base import StreamShape
from baton.engine.models.shard import Shard
from baton.ranks.executor.passages import Incoming, Outgoing, Passages, SharedIncoming, taken_ends
from baton.ranks.executor.world import RanksLost

STREAM = StreamShape(max_tokens=5, hidden_size=3, dtype=torch.bfloat16, num_stages=2)


@pytest.fixture
def ends() -> Iterator[tuple[Outgoing, Incoming]]:
    """Of one passage, as a rank of the first stage and the driver have them."""
    passages = Passages([Shard(0, 1, 0, 2)], STREAM)
    descriptors = map(os.dup, passages.descriptors_of(Shard(0, 1, 0, 2)))
    _, outgoing = taken_ends(Shard(0, 1, 0, 2), STREAM, descriptors.__next__)
    incoming = passages.incoming()
    passages.close()
    assert outgoing is not None
    yield outgoing, incoming
    outgoing.close()
    incoming.close()


def test_steps_come_in_their_order(ends: tuple[Outgoing, Incoming]) -> None:
    outgoing, incoming = ends
    for first in range(0, 40, 2):
        # two are in flight
        steps = [torch.full((1 + number % 5, 3), float(number), dtype=torch.bfloat16) for number in (first, first + 1)]
        for step in steps:
            outgoing.send(step)
        assert all(torch.equal(incoming.receive(len(step)), step) for step in steps)


def test_whoever_waits_learns_that_the_other_is_gone(ends: tuple[Outgoing, Incoming]) -> None:
    outgoing, incoming = ends
    outgoing.close()
    with pytest.raises(RanksLost, match="the stage before is gone"):
        incoming.receive(2)


def test_whoever_sends_learns_that_the_other_is_gone(ends: tuple[Outgoing, Incoming]) -> None:
    outgoing, incoming = ends
    incoming.close()
    with pytest.raises(RanksLost, match="the next stage takes no step"):
        outgoing.send(torch.zeros(2, 3))


def test_another_step_than_the_one_that_is_ordered_is_refused(ends: tuple[Outgoing, Incoming]) -> None:
    outgoing, incoming = ends
    outgoing.send(torch.zeros(2, 3))
    with pytest.raises(RanksLost, match="the stage before computes another step"):
        incoming.receive(3)


def test_a_wait_has_a_deadline() -> None:
    ours, theirs = socket.socketpair()
    incoming = SharedIncoming(ours, torch.zeros(2, 5, 3), timeout_s=0.01)
    with pytest.raises(RanksLost, match="hands no step on: timed out"):
        incoming.receive(1)
    incoming.close()
    theirs.close()
