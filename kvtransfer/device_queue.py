"""What the transfer thread asks of a device, in one order of its own: copies, computations, and marks to wait for.

Owns the stream apart from the engine's and the host memory that a device reaches directly. Knows no blocks.

`CudaQueue` issues everything on a stream of its own, of high priority: its kernels are small, and behind those of a
prefill step they would wait for milliseconds. `HostQueue` does everything at once: a pool on the CPU stands for one on
a device, with the same code around it.

Every wait has a deadline. A device that does not answer raises `TransferFailed`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kvtransfer.pool import HostPin, Pin
from kvtransfer.transports.base import Blocks
from wire.errors import TransferFailed

WAIT_S = 10.0
_SPIN_S = 0.001
_NAP_S = 0.0001
_PORTABLE = 1
"""cudaHostRegisterPortable."""
_log = logging.getLogger(__name__)


class Mark(Protocol):
    """A point in the order of a queue."""

    def is_passed(self) -> bool:
        """Whether everything that was issued before it has happened."""
        ...

    def wait(self) -> None:
        """Wait for that. Raises `TransferFailed` after `WAIT_S`, and when the device has failed."""
        ...


class DeviceQueue(Protocol):
    """An order of work on one device. Used by one thread at a time: who makes it, then who has entered."""

    def enter(self) -> None:
        """Make the device the current one of the calling thread."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Issue a copy between two tensors of equal shape. Host memory must be that of `host_memory` or a direct `Pin`,
        and must not change before a later mark is passed.
        """
        ...

    def run(self, work: Callable[[], None]) -> None:
        """Issue what `work` does with tensors. It must not ask the device for values."""
        ...

    def mark(self) -> Mark:
        """The point after all that was issued so far."""
        ...

    def host_memory(self, num_bytes: int) -> Blocks:
        """Host memory [num_bytes] uint8 that the device reaches directly."""
        ...

    def pin(self, region: Blocks) -> Pin:
        """See `Pool.pin`."""
        ...


def open_queue(device: torch.device) -> DeviceQueue:
    """A queue for tensors of that device."""
    return CudaQueue(device) if device.type == "cuda" else HostQueue()


class _Passed:
    """See `Mark`."""

    def is_passed(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing is under way."""


class HostQueue:
    """Everything has happened when a call returns. See `DeviceQueue`."""

    def enter(self) -> None:
        """See `DeviceQueue.enter`: a host has no current device."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `DeviceQueue.copy`."""
        # numpy's copy is one memcpy; torch's would start worker threads for it
        np.copyto(target.numpy(), source.numpy())

    def run(self, work: Callable[[], None]) -> None:
        """See `DeviceQueue.run`."""
        work()

    def mark(self) -> Mark:
        """See `DeviceQueue.mark`."""
        return _Passed()

    def host_memory(self, num_bytes: int) -> Blocks:
        """See `DeviceQueue.host_memory`."""
        return np.empty(num_bytes, dtype=np.uint8)

    def pin(self, region: Blocks) -> Pin:
        """See `Pool.pin`."""
        return HostPin()


class CudaQueue:
    """A stream of a GPU. See `DeviceQueue`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda: Any = torch.cuda
        # below zero is above the engine's
        self._stream = self._cuda.Stream(device, priority=-1)

    def enter(self) -> None:
        """See `DeviceQueue.enter`. On a thread with another current device, choosing a stream and asking an event would
        open a context there, too: half a GiB of somebody else's memory.
        """
        self._cuda.set_device(self._device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `DeviceQueue.copy`."""
        # a pool that was made in inference mode may only be written in it
        with self._cuda.stream(self._stream), torch.inference_mode():
            target.copy_(source, non_blocking=True)

    def run(self, work: Callable[[], None]) -> None:
        """See `DeviceQueue.run`."""
        with self._cuda.stream(self._stream), torch.inference_mode():
            work()

    def mark(self) -> Mark:
        """See `DeviceQueue.mark`."""
        return _mark(self._stream)

    def host_memory(self, num_bytes: int) -> Blocks:
        """See `DeviceQueue.host_memory`."""
        array: Blocks = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        return array

    def pin(self, region: Blocks) -> Pin:
        """See `Pool.pin`. Memory that the driver does not take is used as it is: slower, and right all the same."""
        runtime = self._cuda.cudart()
        with self._cuda.device(self._device):
            error = int(runtime.cudaHostRegister(region.ctypes.data, region.nbytes, _PORTABLE))
        if not error:
            return _CudaPin(region, runtime, self._device)
        _log.warning("%d bytes of shared memory could not be pinned (CUDA error %d)", region.nbytes, error)
        _forget_error(self._device)
        return HostPin(is_direct=False)


def wait_for_stream(stream: Any) -> None:
    """Wait until a stream of a GPU has done what it was given. Raises `TransferFailed` as `Mark.wait`."""
    _mark(stream).wait()


def _mark(stream: Any) -> _EventMark:
    cuda: Any = torch.cuda
    event = cuda.Event()
    event.record(stream)
    return _EventMark(event)


def _forget_error(device: torch.device) -> None:
    """CUDA reports an error of the runtime once more at the next launch of the same thread: let it be this one."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


class _EventMark:
    """See `Mark`."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_passed(self) -> bool:
        try:
            return bool(self._event.query())
        except RuntimeError as error:
            raise TransferFailed(f"the device of the KV pool has failed: {error}") from None

    def wait(self) -> None:
        # most waits are for 0.1 ms: not worth a sleep, but other threads may run meanwhile
        begun_s = time.monotonic()
        while not self.is_passed():
            waited_s = time.monotonic() - begun_s
            if waited_s > WAIT_S:
                raise TransferFailed(f"the device of the KV pool did not finish a copy in {WAIT_S:g} s")
            time.sleep(0.0 if waited_s < _SPIN_S else _NAP_S)


class _CudaPin:
    """See `Pin`."""

    is_direct = True

    def __init__(self, region: Blocks, runtime: Any, device: torch.device) -> None:
        self._region: Blocks | None = region
        self._runtime = runtime
        self._device = device

    def close(self) -> None:
        """Must be called while the memory is still mapped."""
        region, self._region = self._region, None
        if region is not None and (error := int(self._runtime.cudaHostUnregister(region.ctypes.data))):
            _log.warning("shared memory could not be unpinned (CUDA error %d)", error)
            _forget_error(self._device)
