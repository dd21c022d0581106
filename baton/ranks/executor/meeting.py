"""Where ranks that form a group find each other: what each posts, the others read.

Owns nothing but the store that gloo asks, and the names of groups. What is posted travels over the channels between
driver and ranks, so there is no file and no port at which anybody else could meet them. A group is the ranks of a
stage, or the two ends of a passage without shared memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from baton.engine.models.shard import Shard
from baton.ranks.executor.messages import Begin, Channel, Order, Posted, Report
from baton.runtime.channel import ChannelBroken

MEET_TIMEOUT_S = 60.0
"""The time in which ranks that run must have found each other."""
Post = Callable[[Posted], None]
"""Tells the other ranks of its group."""
Await = Callable[[str, str], bytes]
"""What was posted in this group under this key, once it was. Raises `BatonError` at its deadline."""
MeetingOf = Callable[[str], "Meeting"]
_STORE: Any = getattr(dist, "Store", object)  # a torch without torch.distributed is refused by `World`


class Meeting(_STORE):  # type: ignore[misc]
    """The store of one group at one rank: what it sets is posted, and what it gets has been posted by another."""

    def __init__(self, group: str, post: Post, await_posted: Await) -> None:
        super().__init__()
        self._group, self._post, self._await_posted = group, post, await_posted
        self._own: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        """Keep an entry of this rank's, and post it to the others of the group."""
        self._own[key] = bytes(value)
        self._post(Posted(self._group, key, bytes(value)))

    def get(self, key: str) -> bytes:
        own = self._own.get(key)
        return self._await_posted(self._group, key) if own is None else own

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


def stage_group(stage: int) -> str:
    """The name of the group of a stage's ranks."""
    return f"stage {stage}"


def passage_group(stage: int, rank: int) -> str:
    """The ends of the passage from this rank of a stage to the next."""
    return f"passage {stage} {rank}"


def groups_of(shard: Shard) -> list[str]:
    """All that a rank may be in."""
    found = [stage_group(shard.stage)]
    if not shard.is_first_stage:
        found.append(passage_group(shard.stage - 1, shard.rank))
    if not shard.is_last_stage:
        found.append(passage_group(shard.stage, shard.rank))
    return found


class RankOrders:
    """The driver as another rank hears it: orders one after another, and between them what others have posted."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._posted: dict[tuple[str, str], bytes] = {}

    def next(self, timeout_s: float | None) -> Order | Report:
        """The next order. Raises `ChannelBroken`, also when none comes within `timeout_s`; None: waits on."""
        while isinstance(message := self._channel.receive(timeout_s), Posted):
            self._note(message)
        return message

    def begin(self, timeout_s: float) -> Begin:
        """The first order. Raises `ChannelBroken`."""
        begin = self.next(timeout_s)
        if not isinstance(begin, Begin):
            raise ChannelBroken("the driver begins with something else")
        return begin

    def meeting(self, group: str) -> Meeting:
        """The store by which the ranks of a group find each other."""
        return Meeting(group, self._post, self._await_posted)

    def _post(self, posted: Posted) -> None:
        self._channel.send(posted, MEET_TIMEOUT_S)

    def _await_posted(self, group: str, key: str) -> bytes:
        deadline_s = time.monotonic() + MEET_TIMEOUT_S
        while (group, key) not in self._posted:
            message = self._channel.receive(max(0.1, deadline_s - time.monotonic()))
            if not isinstance(message, Posted):
                raise ChannelBroken(f"the driver says {type(message).__name__} to a rank that meets others")
            self._note(message)
        return self._posted[group, key]

    def _note(self, posted: Posted) -> None:
        self._posted[posted.group, posted.key] = posted.value
