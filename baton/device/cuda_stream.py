"""A stream of a GPU for transfers, apart from the engine's, and the host memory that the GPU reaches directly.

Owns the stream, the events on it, and the registrations of pinned memory. Knows no blocks.

The stream has a high priority: its kernels are small, and behind those of a prefill step they would wait for
milliseconds.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from baton.device.events import CudaEvent
from baton.device.pinning import HostPin, Pin
from baton.device.stream import COPY_TIMEOUT_S, HostBytes, bind_thread

_SPIN_S = 0.001
"""Most waits are for 0.1 ms: not worth a nap, but other threads may run meanwhile."""
_PORTABLE = 1
"""cudaHostRegisterPortable."""
_log = logging.getLogger(__name__)


class CudaStream:
    """A CUDA stream of high priority for transfers, on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda: Any = torch.cuda
        # below zero is above the engine's
        self._stream = self._cuda.Stream(device, priority=-1)

    def enter(self) -> None:
        """Make this stream's device the current one of the calling thread."""
        bind_thread(self._device)

    def current(self) -> AbstractContextManager[Any]:
        """A context in which torch issues its work on this stream."""
        context: AbstractContextManager[Any] = self._cuda.stream(self._stream)
        return context

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Issue an asynchronous copy on this stream."""
        # a pool that was made in inference mode may only be written in it
        with self.current(), torch.inference_mode():
            target.copy_(source, non_blocking=True)

    def run(self, work: Callable[[], None]) -> None:
        """Call `work` with this stream as the current one."""
        with self.current(), torch.inference_mode():
            work()

    def record_event(self) -> CudaEvent:
        """Record an event for which the host spins for a millisecond before it sleeps: transfers are short."""
        event = CudaEvent(_SPIN_S)
        event.record(self._stream)
        return event

    def synchronize(self) -> None:
        """Wait until this stream is idle. Raises `DeviceFailed` after `COPY_TIMEOUT_S` seconds."""
        self.record_event().wait(COPY_TIMEOUT_S)

    def host_memory(self, num_bytes: int) -> HostBytes:
        """Pinned host memory, [num_bytes] uint8."""
        array: HostBytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        return array

    def pin(self, region: HostBytes) -> Pin:
        """Register `region` with the driver. Memory that it refuses is used without a pin: that is slower, and still
        correct."""
        runtime = self._cuda.cudart()
        with self._cuda.device(self._device):
            error = int(runtime.cudaHostRegister(region.ctypes.data, region.nbytes, _PORTABLE))
        if not error:
            return _CudaPin(region, runtime, self._device)
        _log.warning("%d bytes of shared memory could not be pinned (CUDA error %d)", region.nbytes, error)
        _forget_error(self._device)
        return HostPin(is_direct=False)


class _CudaPin:
    """A registration of host memory with the CUDA driver; `close` ends it."""

    is_direct = True

    def __init__(self, region: HostBytes, runtime: Any, device: torch.device) -> None:
        self._region: HostBytes | None = region
        self._runtime = runtime
        self._device = device

    def close(self) -> None:
        """Must be called while the memory is still mapped."""
        region, self._region = self._region, None
        if region is not None and (error := int(self._runtime.cudaHostUnregister(region.ctypes.data))):
            _log.warning("shared memory could not be unpinned (CUDA error %d)", error)
            _forget_error(self._device)


def _forget_error(device: torch.device) -> None:
    """CUDA reports an error of the runtime once more at the next launch of the same thread: let it be this one."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
