"""The world of the ranks of a stage: a group of `torch.distributed` over which they add up and gather.

Owns how the group is formed and its deadlines. No state of the whole process: nothing is initialized globally. The
ranks meet in a file of a folder that only this user can read, listen on loopback, and show each other a nonce that the
driver told each of them: whoever only reached a port does not belong.

Invariants: every rank makes the same calls in the same order; summands are added in the order of ranks, so that the
bits of a row's sum do not depend on how many rows are added up with it; no call waits longer than `timeout_s`, and one
whose other end is dead fails at once. After a failed call the group is of no use.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from device.base import STEP_TIMEOUT_S, DeviceFailed
from engine.models.shard import Shard
from wire.errors import InvalidSetting

MEET_TIMEOUT_S = 60.0
"""The time in which ranks that run must have found each other."""
_SMALL_BYTES = 2**16
"""Measured for 4 ranks: everybody adding up 256 bytes takes a third of the time of gloo's own sum, and with 4 MiB four
times as long."""
_LOOPBACK = "127.0.0.1"
_DIST: Any = dist
"""The module without its types, which lack what it does not re-export."""


class RanksLost(DeviceFailed):
    """A call among the ranks has failed: one of them is gone, or does not make it in time."""


class World:
    """See `Collectives`. Blocks until all ranks are there. Raises `RanksLost`, and `InvalidSetting` when this torch has
    no gloo."""

    def __init__(self, shard: Shard, meeting: str, nonce: bytes, timeout_s: float = STEP_TIMEOUT_S) -> None:
        if not (dist.is_available() and dist.is_gloo_available()):
            raise InvalidSetting("--tensor-parallel-size: this torch has no gloo; install a standard build of torch")
        self._shard = shard
        # kept as long as the group, which refers to it
        self._store: Any = _DIST.FileStore(meeting, shard.size)
        self._store.set_timeout(timedelta(seconds=MEET_TIMEOUT_S))
        self._group: Any = self._call(self._form, timeout_s)
        self._recognise(nonce)

    def add_up(self, summand: Tensor) -> Tensor:
        """See `Collectives.add_up`. A small sum is fastest when everybody gets all summands and adds them up."""
        if summand.nbytes > _SMALL_BYTES:
            return self._add_up_parts(summand)
        return summand.copy_(_sum(self._summands(summand)))

    def _add_up_parts(self, summand: Tensor) -> Tensor:
        """Each rank adds up a part of it, and everybody gets all parts."""
        size = self._shard.size
        width = -(-summand.numel() // size)
        own = torch.zeros(size * width, dtype=summand.dtype)
        own[: summand.numel()] = summand.view(-1)
        # as bytes: they are only moved
        theirs = torch.empty_like(own)
        moved = [theirs.view(torch.uint8), own.view(torch.uint8), [], []]
        self._call(lambda: self._group.alltoall_base(*moved).wait())
        part = _sum(list(theirs.view(size, width)))
        parts = list(own.view(size, width))
        self._call(lambda: self._group.allgather([parts], [part]).wait())
        return summand.copy_(own[: summand.numel()].view_as(summand))

    def side_by_side(self, share: Tensor) -> Tensor:
        """See `Collectives.side_by_side`."""
        if self._shard.rank > 0:
            self._call(lambda: self._group.gather([], [share], _to_first()).wait())
            return share
        shares = [torch.empty_like(share) for _ in range(self._shard.size)]
        self._call(lambda: self._group.gather([shares], [share], _to_first()).wait())
        return torch.cat(shares, dim=1)

    def _summands(self, own: Tensor) -> list[Tensor]:
        """What each rank has, in the order of ranks."""
        found = [torch.empty_like(own) for _ in range(self._shard.size)]
        self._call(lambda: self._group.allgather([found], [own]).wait())
        return found

    def _form(self, timeout_s: float) -> Any:
        gloo = _DIST.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=_LOOPBACK, lazy_init=False)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        return gloo(self._store, self._shard.rank, self._shard.size, options)

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


def join_stage(shard: Shard, meeting: str, nonce: bytes) -> World | None:
    """The world of a stage; None for one rank. Raises as `World`."""
    return World(shard, f"{meeting}-{shard.stage}", nonce) if shard.size > 1 else None


def _to_first() -> Any:
    options: Any = _DIST.GatherOptions()
    options.rootRank = 0
    return options
