"""A device made of the host's cores that behaves like a GPU where correctness depends on it.

Owns: staging memory with fixed addresses that is really copied, graphs that replay recorded operations on the tensors
they were recorded with, results that are taken when they are fetched, and notices that come late. Code that uses a view
before its upload, bakes a value into a graph, asks for a value while recording, or does not wait for notices gets other
results here than on a plain host, or an error. That makes the code paths of a GPU testable without one.

It knows no CUDA. What it cannot show: races between host and device, since every operation is done when its call
returns, and memory that a graph reuses for several of its intermediate results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baton.device.base import STEP_TIMEOUT_S, Array, Graph
from baton.device.host import PresentCopy
from baton.device.notices import NoticeThread
from baton.device.staging import StagedMemory

_Outputs = TypeVar("_Outputs")
_POISON = 0xA5
_NOTICE_DELAY_S = 0.001
"""Later than the result of a small step, as it may be on a GPU."""
_ASKS_FOR_VALUES = frozenset(
    {"_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim"}
)
_BRINGS_HOST_VALUES = frozenset({"lift_fresh", "lift_fresh_copy"})
_INDEXES = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})


class EmulatedStaging:
    """Staging with separate host and device memory, both on the CPU, and a real copy between them."""

    def __init__(self, num_bytes: int) -> None:
        self._host = torch.zeros(num_bytes, dtype=torch.uint8)
        self._device = torch.full((num_bytes,), _POISON, dtype=torch.uint8)
        self._memory = StagedMemory(self._host, self._device)

    def begin(self) -> None:
        """Begin a new step. Device memory is filled with a poison, so a view of the last step shows wrong values."""
        self._memory.layout.reset()
        self._device.fill_(_POISON)

    def put(self, values: Array, capacity: int = 0) -> Tensor:
        """Copy `values` [n] into host memory; return their view in device memory, which holds poison until `upload`."""
        return self._memory.put(values, capacity)

    def upload(self) -> None:
        """Copy the bytes in use to device memory, at once."""
        num_bytes = self._memory.layout.num_used_bytes
        self._device[:num_bytes] = self._host[:num_bytes]


@dataclass(frozen=True, slots=True)
class _Call:
    """One operation as it was recorded; `fresh` are the outputs that own their memory."""

    operation: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    fresh: tuple[tuple[int, Tensor], ...]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps every operation with the tensors it was called with."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        _require_recordable(func, args)
        outputs = func(*args, **keywords)
        known = {_memory(tensor) for tensor in _tensors((args, keywords))}
        fresh = tuple(
            (place, tensor)
            for place, tensor in enumerate(tree_leaves(outputs))
            if isinstance(tensor, Tensor) and _memory(tensor) not in known
        )
        self.calls.append(_Call(func, args, keywords, fresh))
        return outputs


class EmulatedGraph:
    """Recorded torch operations with the tensors that they were recorded on."""

    def __init__(self, calls: Sequence[_Call]) -> None:
        self._calls = calls

    @torch.inference_mode()
    def replay(self) -> None:
        """Compute all operations again, in order. Nothing of the recorded Python runs again."""
        for call in self._calls:
            outputs = tree_leaves(call.operation(*call.arguments, **call.keywords))
            for begun in outputs:
                if isinstance(begun, torch.ScriptObject):  # a call among ranks
                    _wait_for(begun)
            for place, recorded in call.fresh:
                recorded.copy_(outputs[place])


class EmulatedDevice:
    """A device on the CPU that is used like a GPU. `num_graphs` counts the graphs that were recorded."""

    torch_device = torch.device("cpu")
    has_own_memory = True
    is_asynchronous = True
    records = True

    def __init__(self) -> None:
        self.num_graphs = 0
        self._notices = NoticeThread(begin=_nothing_to_begin)

    def staging(self, num_bytes: int) -> EmulatedStaging:
        """Staging memory of `num_bytes` bytes on either side."""
        return EmulatedStaging(num_bytes)

    def record(self, run: Callable[[], _Outputs]) -> tuple[Graph, _Outputs]:
        """Record the operations of `run`. Raises `RuntimeError` for what a GPU could not record.

        Unlike on a GPU, the operations are computed while they are recorded.
        """
        recorder = _Recorder()
        with recorder:
            outputs = run()
        self.num_graphs += 1
        return EmulatedGraph(recorder.calls), outputs

    def fetch(self, tensors: Sequence[Tensor]) -> PresentCopy:
        """Copies of the tensors as they are now."""
        return PresentCopy(tuple(tensor.clone().numpy() for tensor in tensors))

    def notify(self, call: Callable[[], None]) -> None:
        """Call `call` on the notice thread, a little late."""
        self._notices.add(_LateEvent(time.monotonic() + _NOTICE_DELAY_S), call)

    def settle(self, timeout_s: float = STEP_TIMEOUT_S) -> None:
        """Wait until the notice thread has made all calls. Raises `DeviceFailed` after `timeout_s` seconds."""
        self._notices.settle(timeout_s)

    def issuing(self) -> AbstractContextManager[None]:
        """A context that translates no errors: the CPU raises its own."""
        return nullcontext()

    def synchronize(self) -> None:
        """Do nothing: every operation is done when its call returns."""

    def close(self) -> None:
        """End the notice thread."""
        self._notices.close()


def _nothing_to_begin() -> None:
    """A host has no current device."""


@dataclass(frozen=True, slots=True)
class _LateEvent:
    """An event that has passed once the monotonic clock shows `moment_s`."""

    moment_s: float

    def is_passed(self) -> bool:
        return time.monotonic() >= self.moment_s

    def wait(self, timeout_s: float) -> None:
        time.sleep(min(timeout_s, max(0.0, self.moment_s - time.monotonic())))


def _wait_for(work: Any) -> None:
    work.wait()


def _require_recordable(operation: Any, arguments: tuple[Any, ...]) -> None:
    name = operation.overloadpacket.__name__
    if name in _ASKS_FOR_VALUES:
        raise RuntimeError(f"{name} asks the device for a value, which cannot be recorded")
    if name in _BRINGS_HOST_VALUES:
        raise RuntimeError(f"{name} brings values of the host along, which cannot be recorded")
    if name in _INDEXES and any(tensor.dtype == torch.bool for tensor in _tensors(arguments[1:2])):
        raise RuntimeError(f"{name} with a mask needs the number of its true values, which cannot be recorded")


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _memory(tensor: Tensor) -> int:
    """Identity of the memory a tensor is a view of."""
    if tensor.layout != torch.strided:
        return id(tensor)  # packed weights of oneDNN have no memory that could be looked at
    return tensor.untyped_storage().data_ptr() or id(tensor)
