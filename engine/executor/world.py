"""The world of the ranks of a stage: a group of `torch.distributed` over which they add up and gather.

Owns how the group is formed and its deadlines. No state of the whole process: nothing is initialized globally. The
ranks find each other by what they post over their channels to the driver (`meeting`), listen on loopback, or at the
address of their machine where they are on several, and show each other a nonce that the driver told each of them:
whoever only reached a port does not belong. What gloo sends is plain TCP.

Invariants: every rank makes the same calls in the same order; summands are added in the order of ranks, so that the
bits of a row's sum do not depend on how many rows are added up with it; no call waits longer than `timeout_s`, and one
whose other end is dead fails at once. After a failed call the group is of no use.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from device.base import STEP_TIMEOUT_S, DeviceFailed
from engine.executor.meeting import Meeting, MeetingOf, passage_group, stage_group
from engine.executor.spread import LOOPBACK
from engine.models.shard import Shard
from wire.errors import InvalidSetting

_SMALL_BYTES = 2**16
"""Measured for 4 ranks: everybody adding up 256 bytes takes a third of the time of gloo's own sum, and with 4 MiB four
times as long."""
_DIST: Any = dist
"""The module without its types, which lack what it does not re-export."""


class RanksLost(DeviceFailed):
    """A call among the ranks has failed: one of them is gone, or does not make it in time."""


class World:
    """See `Collectives`. Blocks until all ranks are there. Raises `RanksLost`, and `InvalidSetting` when this torch has
    no gloo. `host`: the address at which this rank listens."""

    def __init__(
        self, shard: Shard, meeting: Meeting, nonce: bytes, host: str = LOOPBACK, timeout_s: float = STEP_TIMEOUT_S
    ) -> None:
        if not (dist.is_available() and dist.is_gloo_available()):
            raise InvalidSetting("--tensor-parallel-size: this torch has no gloo; install a standard build of torch")
        self._shard = shard
        self._meeting = meeting  # kept as long as the group, which refers to it
        self._group: Any = self._call(self._form, host, timeout_s)
        self._recognise(nonce)

    def add_up(self, summand: Tensor) -> Tensor:
        """See `Collectives.add_up`. A small sum is fastest when everybody gets all summands and adds them up."""
        if summand.nbytes > _SMALL_BYTES and self._shard.size > 2:
            return self._add_up_parts(summand)
        if summand.nbytes > _SMALL_BYTES:  # two have no order
            self._call(lambda: self._group.allreduce([summand]).wait())
            return summand
        return summand.copy_(_sum(self._summands(summand)))

    def _add_up_parts(self, summand: Tensor) -> Tensor:
        """Each rank adds up a part of it, and everybody gets all parts."""
        size, own = self._shard.size, summand.view(-1)
        width = -(-len(own) // size)
        if size * width > len(own):
            own = torch.cat((own, own.new_zeros(size * width - len(own))))
        # as bytes: they are only moved
        theirs = torch.empty_like(own)
        moved = [theirs.view(torch.uint8), own.view(torch.uint8), [], []]
        self._call(lambda: self._group.alltoall_base(*moved).wait())
        part = _sum(list(theirs.view(size, width)))
        self._call(lambda: self._group._allgather_base(own, part).wait())
        if own.data_ptr() != summand.data_ptr():
            summand.copy_(own[: summand.numel()].view_as(summand))
        return summand

    def side_by_side(self, share: Tensor) -> Tensor:
        """See `Collectives.side_by_side`."""
        if self._shard.rank > 0:
            self._call(lambda: self._group.gather([], [share], _to_first()).wait())
            return share
        shares = [torch.empty_like(share) for _ in range(self._shard.size)]
        self._call(lambda: self._group.gather([shares], [share], _to_first()).wait())
        return torch.cat(shares, dim=1)

    def begin_send(self, tensor: Tensor) -> Callable[[], None]:
        """Of a pair: begin to send a contiguous tensor to the second. What is returned waits until it is read no more;
        both raise `RanksLost`."""
        work = self._call(lambda: self._group.send([tensor], 1, 0))
        return partial(self._call, lambda: work.wait())

    def receive(self, into: Tensor) -> None:
        """Of a pair: wait for what the first sends next. Raises `RanksLost`."""
        self._call(lambda: self._group.recv([into], 0, 0).wait())

    def _summands(self, own: Tensor) -> list[Tensor]:
        """What each rank has, in the order of ranks."""
        found = [torch.empty_like(own) for _ in range(self._shard.size)]
        self._call(lambda: self._group.allgather([found], [own]).wait())
        return found

    def _form(self, host: str, timeout_s: float) -> Any:
        gloo = _DIST.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host, lazy_init=False)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        return gloo(self._meeting, self._shard.rank, self._shard.size, options)

    def _recognise(self, nonce: bytes) -> None:
        shown = torch.frombuffer(bytearray(nonce), dtype=torch.uint8)
        if not all(torch.equal(each, shown) for each in self._summands(shown)):
            raise RanksLost("somebody who is no rank of this engine has joined them")

    def _call(self, call: Callable[..., Any], *arguments: object) -> Any:
        begin_s = time.monotonic()
        try:
            return call(*arguments)
        except RuntimeError as error:  # a lost connection, and a wait that was too long
            waited_s = time.monotonic() - begin_s
            reason = str(error).partition("\n")[0]
            raise RanksLost(f"the ranks lost each other after {waited_s:.1f} s: {reason:.200}") from None


def _sum(summands: list[Tensor]) -> Tensor:
    """In their order; the first of them becomes it."""
    first, *others = summands
    for other in others:
        first.add_(other)
    return first


def join_stage(shard: Shard, meeting_of: MeetingOf, nonce: bytes, host: str) -> World | None:
    """The world of a stage; None for one rank. Raises as `World`."""
    return World(shard, meeting_of(stage_group(shard.stage)), nonce, host) if shard.size > 1 else None


class Pairs(NamedTuple):
    """The passages of a rank that lead to other machines, each a world of two. None: there is none."""

    before: World | None
    next: World | None


def join_pairs(
    shard: Shard, meeting_of: MeetingOf, nonce: bytes, host: str, *, is_before_afar: bool, is_next_afar: bool
) -> Pairs:
    """Find the other ends. Raises as `World`."""

    def joined(place: int, stage: int) -> World:
        return World(Shard(place, 2), meeting_of(passage_group(stage, shard.rank)), nonce, host)

    before = joined(1, shard.stage - 1) if is_before_afar else None
    return Pairs(before, joined(0, shard.stage) if is_next_afar else None)


def _to_first() -> Any:
    options: Any = _DIST.GatherOptions()
    options.rootRank = 0
    return options
