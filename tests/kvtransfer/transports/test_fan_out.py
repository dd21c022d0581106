"""Several senders that take their parts of the same blocks, each when it has room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from baton.kvtransfer.messages import ProcessIdentity
from baton.kvtransfer.process_identity import this_process
from baton.kvtransfer.transports.base import Move, Sender
from baton.kvtransfer.transports.fan_out import FanOutSender
from baton.wire.request_key import RequestKey
from tests.request_keys import A, B

FIRST, SECOND = [Move(0, 1, 2, 3)], [Move(1, 4, 5, 6)]
Taken = tuple[RequestKey, Sequence[Move]]


class Part:
    """A sender that takes so many pushes as it has `room` for."""

    def __init__(self, room: int, *writers: ProcessIdentity) -> None:
        self.room, self.writers = room, writers
        self.taken: list[Taken] = []
        self.needs_fence = self.is_closed = False
        self.reads: set[RequestKey] = set()
        self.num_polls = 0

    def push(self, key: RequestKey, moves: Sequence[Move]) -> bool:
        if not self.room:
            return False
        self.room -= 1
        self.taken.append((key, moves))
        return True

    def poll(self) -> None:
        self.num_polls += 1

    def wait_on(self) -> Sequence[Any]:
        return [self]

    def is_reading(self, key: RequestKey) -> bool:
        return key in self.reads

    def close(self) -> None:
        self.is_closed = True


def made_of(*parts: Part) -> FanOutSender:
    return FanOutSender([cast("Sender", part) for part in parts])


def test_what_one_has_taken_the_others_get_when_they_have_room() -> None:
    quick, slow = Part(9), Part(0)
    sender = made_of(quick, slow)
    assert sender.push(A, FIRST)
    assert (quick.taken, slow.taken) == ([(A, FIRST)], [])
    assert not sender.push(A, SECOND), "the other waits for the piece before"
    assert quick.taken == [(A, FIRST)]
    slow.room = 1
    sender.poll()
    assert (slow.taken, quick.num_polls, slow.num_polls) == ([(A, FIRST)], 1, 1)
    slow.room = 1
    assert sender.push(A, SECOND)
    assert quick.taken == slow.taken == [(A, FIRST), (A, SECOND)]


def test_a_push_also_brings_the_others_what_they_lack() -> None:
    quick, slow = Part(9), Part(0)
    sender = made_of(quick, slow)
    sender.push(A, FIRST)
    slow.room = 2
    assert sender.push(B, SECOND)
    assert quick.taken == slow.taken == [(A, FIRST), (B, SECOND)]


def test_what_none_has_taken_is_not_begun() -> None:
    parts = Part(0), Part(0)
    sender = made_of(*parts)
    assert not sender.push(A, FIRST)
    assert not sender.is_reading(A)
    for part in parts:
        part.room = 1
    sender.poll()
    assert [part.taken for part in parts] == [[], []]
    assert made_of().push(A, FIRST), "nobody needs anything of it"


def test_blocks_are_read_as_long_as_one_reads_or_waits_to() -> None:
    quick, slow = Part(9), Part(0)
    sender = made_of(quick, slow)
    sender.push(A, FIRST)
    assert (sender.is_reading(A), sender.is_reading(B)) == (True, False)
    slow.room = 1
    sender.poll()
    assert not sender.is_reading(A)
    slow.reads = {A}
    assert (sender.is_reading(A), sender.is_reading(B)) == (True, False)


def test_closed_it_pushes_nothing_more_and_its_parts_are_closed() -> None:
    quick, slow = Part(9), Part(0)
    sender = made_of(quick, slow)
    sender.push(A, FIRST)
    sender.close()
    slow.room = 1
    sender.poll()
    assert (quick.is_closed, slow.is_closed, slow.taken, sender.is_reading(A)) == (True, True, [], False)


def test_it_is_what_its_parts_are_together() -> None:
    us, other = this_process(), ProcessIdentity("host", 1, 1)
    parts = Part(1, us, other), Part(1, us)
    sender = made_of(*parts)
    assert (sender.writers, sender.wait_on(), sender.needs_fence) == ((us, other), list(parts), False)
    assert (sender.is_silent, sender.pushes_parts) == (False, False)
    parts[1].needs_fence = True
    assert sender.needs_fence
    with pytest.raises(NotImplementedError):
        sender.push_part(A, FIRST, 0, 1)
