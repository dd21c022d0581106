"""A CUDA device: pinned staging, CUDA graphs, results by event, and a thread that tells what has happened.

Owns the engine's stream (the current one of the thread that constructs it), the pool of memory that graphs share, and
the notice thread. Knows no models.

Ordering. Everything a step issues, its uploads and its fetches included, is on one stream: a later step may be issued
while an earlier one runs, and still sees what that one wrote. Only the host can be too fast: it must not touch pinned
memory that an upload still reads, so `begin` waits for the event behind the last upload. Work on other streams and in
other processes is ordered by the host: it starts after `Arrival.wait` or a notice.

Errors of CUDA are not recovered from: after most of them the context is of no use, so they end as `DeviceFailed`.
Running out of memory is the exception, and stays an error of its step.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.device.base import STEP_TIMEOUT_S, Array, DeviceFailed, Graph
from engine.device.staging import StagingLayout

_Outputs = TypeVar("_Outputs")
_Event: Any = torch.cuda.Event
_LOOK_AGAIN_S = 2e-5
_MAX_NOTICES = 4096
_CLOSE_S = 5.0


class CudaStaging:
    """See `Staging`: pinned memory, device memory of the same size, one asynchronous copy."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self._host = self._pinned.numpy()
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._layout = StagingLayout(num_bytes)
        self._taken = _Event()
        self._is_under_way = False

    def begin(self) -> None:
        """See `Staging.begin`. Raises `DeviceFailed`."""
        if self._is_under_way:
            wait_for(self._taken, STEP_TIMEOUT_S)
            self._is_under_way = False
        self._layout.reset()

    def put(self, values: Array, capacity: int = 0) -> Tensor:
        """See `Staging.put`."""
        place = self._layout.place(values, capacity)
        self._host[place.begin : place.end] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return self._device[place.begin : place.end].view(place.dtype)

    def upload(self) -> None:
        """See `Staging.upload`."""
        num_bytes = self._layout.num_used_bytes
        self._device[:num_bytes].copy_(self._pinned[:num_bytes], non_blocking=True)
        self._taken.record()
        self._is_under_way = True


@dataclass(frozen=True, slots=True)
class CudaArrival:
    """See `Arrival`: copies into pinned memory, and the event behind them."""

    copies: tuple[Tensor, ...]
    event: Any

    def wait(self, timeout_s: float = STEP_TIMEOUT_S) -> tuple[Array, ...]:
        """See `Arrival.wait`."""
        wait_for(self.event, timeout_s)
        return tuple(copy.numpy() for copy in self.copies)


class CudaDevice:
    """See `Device`, and the module. Made and used by one thread; `index` counts among the visible devices."""

    has_own_memory = True
    overlaps = True
    records = True

    def __init__(self, index: int) -> None:
        torch.cuda.set_device(index)
        self.torch_device = torch.device("cuda", index)
        self._graph_memory: Any = None
        self._notices = _NoticeThread(self.torch_device)

    def staging(self, num_bytes: int) -> CudaStaging:
        """See `Device.staging`."""
        return CudaStaging(num_bytes, self.torch_device)

    def record(self, run: Callable[[], _Outputs]) -> tuple[Graph, _Outputs]:
        """See `Device.record`. Graphs share the memory of their intermediate results, so they never run side by side.

        What `run` returns must stay referenced for as long as the graph is replayed: its memory would be given to the
        next one recorded.
        """
        graph = torch.cuda.CUDAGraph()
        # other threads may use CUDA meanwhile: only calls of this one can spoil the recording
        with torch.cuda.graph(graph, pool=self._graph_memory, capture_error_mode="thread_local"):
            outputs = run()
        self._graph_memory = graph.pool()
        return graph, outputs

    def fetch(self, tensors: Sequence[Tensor]) -> CudaArrival:
        """See `Device.fetch`."""
        copies = tuple(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors)
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        event = _Event()
        event.record()
        return CudaArrival(copies, event)

    def notify(self, call: Callable[[], None]) -> None:
        """See `Device.notify`."""
        event = _Event()
        event.record()
        self._notices.add(event, call)

    def settle(self, timeout_s: float = STEP_TIMEOUT_S) -> None:
        """See `Device.settle`."""
        self._notices.settle(timeout_s)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """See `Device.guard`."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except torch.AcceleratorError as error:
            raise DeviceFailed(f"the CUDA device failed: {_first_line(error)}") from error

    def synchronize(self) -> None:
        """See `Device.synchronize`."""
        with self.guard():
            torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        """See `Device.close`."""
        self._notices.close()


class _NoticeThread:
    """Calls what it was given, in order, each when its event has passed. A failure of one ends all later ones."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: queue.Queue[tuple[Any, Callable[[], None]] | None] = queue.Queue(_MAX_NOTICES)
        self._failure: BaseException | None = None
        self._num_added = 0
        self._num_called = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="cuda-notices", daemon=True)
        self._thread.start()

    def add(self, event: Any, call: Callable[[], None]) -> None:
        """By the engine's thread. Raises `DeviceFailed` when far too many wait."""
        try:
            self._waiting.put_nowait((event, call))
        except queue.Full:
            raise DeviceFailed(f"{_MAX_NOTICES} notices wait for the device") from None
        self._num_added += 1

    def settle(self, timeout_s: float) -> None:
        """Wait until all that was added was called. Raises `DeviceFailed`."""
        with self._changed:
            is_done = self._changed.wait_for(
                lambda: self._failure is not None or self._num_called == self._num_added, timeout_s
            )
        if self._failure is not None:
            raise DeviceFailed(f"a notice of the device could not be given: {self._failure}") from self._failure
        if not is_done:
            raise DeviceFailed(f"notices of the device did not come within {timeout_s:g} s")

    def close(self) -> None:
        """End the thread after what it has."""
        if self._thread.is_alive() and self._failure is None:
            self._waiting.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            torch.cuda.set_device(self._device)
            while (notice := self._waiting.get()) is not None:
                event, call = notice
                wait_for(event, STEP_TIMEOUT_S)
                call()
                with self._changed:
                    self._num_called += 1
                    self._changed.notify_all()
        except BaseException as error:  # whoever settles hears of it: nobody is above this thread
            with self._changed:
                self._failure = error
                self._changed.notify_all()


def wait_for(event: Any, timeout_s: float) -> None:
    """Wait until the device has passed `event`; other threads run meanwhile. Raises `DeviceFailed`."""
    deadline_s = time.monotonic() + timeout_s
    try:
        while not event.query():
            if time.monotonic() > deadline_s:
                raise DeviceFailed(f"the CUDA device did not get anything done for {timeout_s:g} s")
            time.sleep(_LOOK_AGAIN_S)
    except RuntimeError as error:
        raise DeviceFailed(f"the CUDA device failed: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
