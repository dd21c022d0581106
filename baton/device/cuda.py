"""A CUDA device: pinned staging, CUDA graphs, results by event, and a thread for notices.

Owns the engine's stream (the current one of the thread that constructs it), the pool of memory that graphs share, and
the notice thread. Knows no models.

Ordering. Everything a step issues, its uploads and its fetches included, is on one stream: a later step may be issued
while an earlier one runs, and still sees what that one wrote. Only the host can be too fast: it must not touch pinned
memory that an upload still reads, so `begin` waits for the event behind the last upload. Work on other streams and in
other processes is ordered by the host: it starts after `HostCopy.wait` or a notice.

Errors of CUDA are not recovered from: after most of them the context is of no use, so they end as `DeviceFailed`.
Running out of memory is the exception, and stays an error of its step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from baton.device.base import STEP_TIMEOUT_S, Array, DeviceFailed, Graph
from baton.device.events import CudaEvent, describe_error
from baton.device.notices import NoticeThread
from baton.device.staging import StagedMemory

_Outputs = TypeVar("_Outputs")


class CudaStaging:
    """Staging in pinned host memory, with device memory of the same size behind it and one asynchronous copy between
    them."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._memory = StagedMemory(self._pinned, self._device)
        self._taken = CudaEvent()
        self._is_in_flight = False

    def begin(self) -> None:
        """Wait until the device has read the last upload, then begin a new step. Raises `DeviceFailed`."""
        if self._is_in_flight:
            self._taken.wait(STEP_TIMEOUT_S)
            self._is_in_flight = False
        self._memory.layout.reset()

    def put(self, values: Array, capacity: int = 0) -> Tensor:
        """Copy `values` [n] into pinned memory; return their view on the device, valid from `upload` on."""
        return self._memory.put(values, capacity)

    def upload(self) -> None:
        """Issue one asynchronous copy of the bytes in use, and the event behind it."""
        num_bytes = self._memory.layout.num_used_bytes
        self._device[:num_bytes].copy_(self._pinned[:num_bytes], non_blocking=True)
        self._taken.record()
        self._is_in_flight = True


@dataclass(frozen=True, slots=True)
class CudaCopy:
    """Results on their way into pinned memory, and the event behind the copies."""

    copies: tuple[Tensor, ...]
    event: CudaEvent

    def wait(self, timeout_s: float = STEP_TIMEOUT_S) -> tuple[Array, ...]:
        """The values, once the event has passed. Raises `DeviceFailed` after `timeout_s` seconds, or when the device
        failed."""
        self.event.wait(timeout_s)
        return tuple(copy.numpy() for copy in self.copies)


class CudaDevice:
    """A CUDA device with its notice thread. Made and used by one thread; `index` counts among the visible devices."""

    has_own_memory = True
    is_asynchronous = True
    records = True

    def __init__(self, index: int) -> None:
        torch.cuda.set_device(index)
        self.torch_device = torch.device("cuda", index)
        self._graph_memory: Any = None
        self._notices = NoticeThread(begin=partial(torch.cuda.set_device, index))

    def staging(self, num_bytes: int) -> CudaStaging:
        """Pinned staging memory for steps of at most `num_bytes` bytes."""
        return CudaStaging(num_bytes, self.torch_device)

    def record(self, run: Callable[[], _Outputs]) -> tuple[Graph, _Outputs]:
        """Record the work of `run` in a CUDA graph, without computing it. Returns the graph and the tensors that it
        writes.

        Graphs share the memory of their intermediate results, so they never run side by side. The caller keeps the
        tensors that `run` returns for as long as it replays the graph: the next recording would be given their memory.
        """
        graph = torch.cuda.CUDAGraph()
        # other threads may use CUDA meanwhile: only calls of this one can make the recording fail
        with (
            _without_collection(),
            torch.cuda.graph(graph, pool=self._graph_memory, capture_error_mode="thread_local"),
        ):
            outputs = run()
        self._graph_memory = graph.pool()
        return graph, outputs

    def fetch(self, tensors: Sequence[Tensor]) -> CudaCopy:
        """Begin copies into pinned memory, ordered behind everything issued so far. Nothing is waited for."""
        copies = tuple(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors)
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        event = CudaEvent()
        event.record()
        return CudaCopy(copies, event)

    def notify(self, call: Callable[[], None]) -> None:
        """Record an event; the notice thread runs `call` once it has passed."""
        event = CudaEvent()
        event.record()
        self._notices.add(event, call)

    def settle(self, timeout_s: float = STEP_TIMEOUT_S) -> None:
        """Wait until the notice thread has made all calls. Raises `DeviceFailed` after `timeout_s` seconds."""
        self._notices.settle(timeout_s)

    @contextmanager
    def issuing(self) -> Iterator[None]:
        """A context that turns errors of the CUDA driver into `DeviceFailed`. Running out of memory is passed on as it
        is."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except torch.AcceleratorError as error:
            raise DeviceFailed(f"the CUDA device failed: {describe_error(error)}") from error

    def synchronize(self) -> None:
        """Wait until the whole device is idle; there is no deadline. Raises `DeviceFailed`."""
        with self.issuing():
            torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        """End the notice thread."""
        self._notices.close()


@contextmanager
def _without_collection() -> Iterator[None]:
    """Destructors of garbage (graphs, events, pinned memory of an earlier engine) may make calls that a recording
    forbids."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
