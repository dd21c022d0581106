"""A stream: an order of work on a device. Transfers have their own, beside the engine's, for copies and checksums.

Owns the contract and its version for the host. Knows no blocks.

`CudaStream` (`cuda_stream`) issues everything on a stream of a GPU; `HostStream` does everything at once: a pool on the
CPU stands for one on a device, with the same code around it.

Every wait has a deadline. A device that does not answer raises `DeviceFailed`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.device.events import Event, PassedEvent
from baton.device.pinning import HostPin, Pin

HostBytes: TypeAlias = npt.NDArray[np.uint8]
COPY_TIMEOUT_S = 10.0
"""The time that work of a transfer may take before the device counts as lost."""


class Stream(Protocol):
    """An order of work on one device. Used by one thread at a time: first by the one that constructs it, then by the
    one that has called `enter`."""

    def enter(self) -> None:
        """Make the device the current one of the calling thread."""
        ...

    def current(self) -> AbstractContextManager[Any]:
        """A context in which the calling thread issues work on this stream."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Issue a copy between two tensors of equal shape. Host memory must be that of `host_memory` or a direct `Pin`,
        and must not change before a later event is passed.
        """
        ...

    def run(self, work: Callable[[], None]) -> None:
        """Issue what `work` does with tensors. It must not ask the device for values."""
        ...

    def record_event(self) -> Event:
        """The point after all that was issued so far."""
        ...

    def synchronize(self) -> None:
        """Wait, up to `COPY_TIMEOUT_S`, until all that was issued so far has happened. Raises as `Event.wait`."""
        ...

    def host_memory(self, num_bytes: int) -> HostBytes:
        """Host memory [num_bytes] uint8 that the device reaches directly."""
        ...

    def pin(self, region: HostBytes) -> Pin:
        """Prepare long-lived host memory, [num_bytes], for many copies. Memory that cannot be pinned is used without a
        pin."""
        ...


def bind_thread(device: torch.device) -> None:
    """Make `device` the current one of the calling thread, before it makes or enters a stream there.

    A thread with another current device would open a context on that device, too, when it chooses a stream or asks an
    event. A context takes half a GiB.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


class HostStream:
    """Everything has happened when a call returns. See `Stream`."""

    def enter(self) -> None:
        """Do nothing: a host has no current device."""

    def current(self) -> AbstractContextManager[Any]:
        """A context that changes nothing."""
        return nullcontext()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy at once, with numpy."""
        # numpy's copy is one memcpy; torch's would start worker threads for it
        np.copyto(target.numpy(), source.numpy())

    def run(self, work: Callable[[], None]) -> None:
        """Call `work` at once, on the calling thread."""
        work()

    def record_event(self) -> Event:
        """An event that has passed already."""
        return PassedEvent()

    def synchronize(self) -> None:
        """Do nothing: no work is ever open."""

    def host_memory(self, num_bytes: int) -> HostBytes:
        """New host memory, [num_bytes] uint8, not initialized."""
        return np.empty(num_bytes, dtype=np.uint8)

    def pin(self, region: HostBytes) -> Pin:
        """A pin that registers nothing: the CPU reaches all memory."""
        return HostPin()
