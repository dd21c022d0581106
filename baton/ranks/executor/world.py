"""The world of the ranks of a stage: a group of `torch.distributed` over which they add up and gather. The two ends of
a passage between stages are a world, too, where they share no memory.

Owns how the group is formed and its deadlines: gloo between tensors of the host, NCCL between GPUs. No state of the
whole process: nothing is initialized globally. The ranks find each other by what they post over their channels to the
driver (`meeting`). With gloo they listen on loopback, or at the address of their machine where they are on several;
NCCL chooses its ways itself. All show each other a nonce that the driver told each of them: whoever only reached a port
does not belong. Nothing of it is encrypted.

Invariants: every rank makes the same calls in the same order. With gloo, summands are added in the order of ranks, so
that the bits of a row's sum do not depend on how many rows are added up with it; no call waits longer than `timeout_s`,
and one whose other end is dead fails at once. With NCCL a call is issued on the current stream and nothing waits in it:
it can be recorded in a graph, and who waits for the stream has the deadline. NCCL does not notice the end of another
process; `abort` ends what is in flight. After a failed call, or that, the group is of no use.

NCCL has no thread of its own here that watches over calls: it would end the process when one is late, and look at
events while a graph is recorded. The mode in which torch starts none is named after what its `wait` does, which nobody
calls here: calls that are no asynchronous ones of torch's return nothing to wait for. torch reads the mode from the
environment when a group is made, and takes it no other way: it is there for that long, so that other groups of the
process are what they would be.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from baton.device.base import STEP_TIMEOUT_S, Device, DeviceFailed
from baton.engine.models.shard import Shard
from baton.ranks.executor.meeting import Meeting, MeetingOf, passage_group, stage_group
from baton.ranks.executor.spread import LOOPBACK
from baton.wire.errors import InvalidSetting

_SMALL_BYTES = 2**16
"""Measured for 4 ranks: everybody adding up 256 bytes takes a third of the time of gloo's own sum, and with 4 MiB four
times as long."""
_HOST = torch.device("cpu")
_MODE = "TORCH_NCCL_BLOCKING_WAIT"
_DIST: Any = getattr(dist, "distributed_c10d", dist)
"""The module without its types, which lack what it does not re-export."""


class RanksLost(DeviceFailed):
    """A call among the ranks has failed: one of them is gone, or does not make it in time."""


class World:
    """The calls among the ranks of a stage, for tensors on `device`. Blocks until all ranks are there. `host`: the
    address at which this rank listens; `records`: whether calls may be recorded, which takes some more time when they
    are not. Raises `RanksLost`, and `InvalidSetting` when this torch lacks the backend."""

    def __init__(
        self,
        shard: Shard,
        meeting: Meeting,
        nonce: bytes,
        host: str = LOOPBACK,
        timeout_s: float = STEP_TIMEOUT_S,
        device: torch.device = _HOST,
        *,
        records: bool = False,
    ) -> None:
        self._shard = shard
        self._meeting = meeting  # kept as long as the group, which refers to it
        self._on_gpu = device.type == "cuda"
        _require_backend(on_gpu=self._on_gpu)
        self._options = _Options()
        form = partial(self._form_nccl, timeout_s) if self._on_gpu else partial(self._form_gloo, host, timeout_s)
        self._backend: Any = self._call(form)
        self._group: Any = self._call(self._grouped, device) if records else self._backend
        self._recognise(nonce, device)

    def add_up(self, summand: Tensor) -> Tensor:
        """The sum of all ranks, in place.

        With gloo a small sum is fastest when everybody gets all summands and adds them up.
        """
        if self._on_gpu or (summand.nbytes > _SMALL_BYTES and self._shard.size == 2):  # two have no order
            self._finish(lambda: self._group.allreduce([summand], self._options.sum))
            return summand
        if summand.nbytes > _SMALL_BYTES:
            return self._add_up_parts(summand)
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
        self._finish(lambda: self._group.alltoall_base(*moved))
        part = _sum(list(theirs.view(size, width)))
        self._finish(lambda: self._group._allgather_base(own, part))
        if own.data_ptr() != summand.data_ptr():
            summand.copy_(own[: summand.numel()].view_as(summand))
        return summand

    def side_by_side(self, share: Tensor) -> Tensor:
        """[N, R * W], gathered on the first rank; `share` [N, W] itself on the others."""
        if self._shard.rank > 0:
            self._finish(lambda: self._group.gather([], [share], self._options.to_first))
            return share
        shares = [torch.empty_like(share) for _ in range(self._shard.size)]
        self._finish(lambda: self._group.gather([shares], [share], self._options.to_first))
        return torch.cat(shares, dim=1)

    def from_first(self, values: Tensor) -> None:
        """Broadcast `values` of the first rank to all, in place."""
        self._finish(lambda: self._group.broadcast([values], self._options.from_first))

    def begin_send(self, tensor: Tensor) -> Callable[[], None]:
        """In a pair, begin to send a contiguous tensor to the second. Returns a function that waits until it is read no
        more; both raise `RanksLost`."""
        work = self._call(lambda: self._group.send([tensor], 1, 0))
        return partial(self._call, lambda: work.wait())

    def receive(self, into: Tensor) -> None:
        """In a pair, wait for what the first sends next. Raises `RanksLost`."""
        self._finish(lambda: self._group.recv([into], 0, 0))

    def abort(self) -> None:
        """End what is in flight on a GPU, so that who waits for it goes on; it has no result then. From any thread.
        On the host calls end by themselves."""
        if self._on_gpu:
            self._backend.abort()

    def _summands(self, own: Tensor) -> list[Tensor]:
        """What each rank has, in the order of ranks."""
        found = [torch.empty_like(own) for _ in range(self._shard.size)]
        self._finish(lambda: self._group.allgather([found], [own], self._options.to_all))
        return found

    def _form_gloo(self, host: str, timeout_s: float) -> Any:
        gloo = _DIST.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host, lazy_init=False)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        return gloo(self._meeting, self._shard.rank, self._shard.size, options)

    def _form_nccl(self, timeout_s: float) -> Any:
        nccl = _DIST.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=timeout_s)
        with _no_watching_thread():
            return nccl(self._meeting, self._shard.rank, self._shard.size, options)

    def _grouped(self, device: torch.device) -> Any:
        """A group over the backend: its calls are operations of torch's, which an emulated device can record. A GPU
        records what is issued either way, and takes the same one."""
        kinds = _DIST.ProcessGroup.BackendType
        kind = kinds.NCCL if self._on_gpu else kinds.GLOO
        group = _DIST.ProcessGroup(self._meeting, self._shard.rank, self._shard.size)
        group._register_backend(device, kind, self._backend)
        group._set_default_backend(kind)
        return group

    def _recognise(self, nonce: bytes, device: torch.device) -> None:
        """Has NCCL connect, too: later the meeting is over."""
        shown = torch.frombuffer(bytearray(nonce), dtype=torch.uint8).to(device)
        if not all(torch.equal(each, shown) for each in self._summands(shown)):
            raise RanksLost("somebody who is no rank of this engine has joined them")

    def _finish(self, call: Callable[[], Any]) -> None:
        """Make a call and wait for it, where there is something to wait for."""
        work = self._call(call)
        if work is not None:
            self._call(work.wait)

    def _call(self, call: Callable[..., Any], *arguments: object) -> Any:
        begin_s = time.monotonic()
        try:
            return call(*arguments)
        except RuntimeError as error:  # a lost connection, and a wait that was too long
            waited_s = time.monotonic() - begin_s
            reason = str(error).partition("\n")[0]
            raise RanksLost(f"the ranks lost each other after {waited_s:.1f} s: {reason:.200}") from None


@contextmanager
def _no_watching_thread() -> Iterator[None]:
    """NCCL groups that are made meanwhile have none: see the module."""
    before = os.environ.get(_MODE)
    os.environ[_MODE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_MODE]
        else:
            os.environ[_MODE] = before


def _require_backend(*, on_gpu: bool) -> None:
    if not (dist.is_available() and (dist.is_nccl_available() if on_gpu else dist.is_gloo_available())):
        backend, build = ("NCCL", "CUDA build of torch for Linux") if on_gpu else ("gloo", "standard build of torch")
        raise InvalidSetting(f"a node of several ranks: this torch has no {backend}; install a {build}")


class _Options:
    """Of calls, each of which is one more operation on the current stream, where there is one."""

    def __init__(self) -> None:
        self.sum, self.to_all = _DIST.AllreduceOptions(), _DIST.AllgatherOptions()
        self.to_first, self.from_first = _DIST.GatherOptions(), _DIST.BroadcastOptions()
        self.to_first.rootRank = self.from_first.rootRank = 0
        for options in (self.sum, self.to_all, self.to_first, self.from_first):
            options.asyncOp = False


def _sum(summands: list[Tensor]) -> Tensor:
    """In their order; the first of them becomes it."""
    first, *others = summands
    for other in others:
        first.add_(other)
    return first


def join_stage(shard: Shard, meeting_of: MeetingOf, nonce: bytes, host: str, device: Device) -> World | None:
    """The world of a stage; None for one rank. Raises as `World`."""
    if shard.size == 1:
        return None
    meeting = meeting_of(stage_group(shard.stage))
    return World(shard, meeting, nonce, host, device=device.torch_device, records=device.records)


class Pairs(NamedTuple):
    """The passages of a rank without shared memory, each a world of two. None: there is none."""

    before: World | None
    next: World | None


def join_pairs(
    shard: Shard,
    meeting_of: MeetingOf,
    nonce: bytes,
    host: str,
    device: Device,
    *,
    is_before_afar: bool,
    is_next_afar: bool,
) -> Pairs:
    """Find the other ends of this rank's passages that are worlds of two. Raises as `World`."""

    def joined(place: int, stage: int) -> World:
        meeting = meeting_of(passage_group(stage, shard.rank))
        return World(Shard(place, 2), meeting, nonce, host, device=device.torch_device)

    before = joined(1, shard.stage - 1) if is_before_afar else None
    return Pairs(before, joined(0, shard.stage) if is_next_afar else None)
