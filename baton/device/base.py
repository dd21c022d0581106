"""The contract between a runner and its device: inputs in one copy, recorded graphs, results brought to the host.

Owns nothing but the contract. A device has one order of work, the *stream* of the engine's thread: everything issued on
it happens in the order of issue, perhaps later than the call that issued it. The host learns what has happened by
waiting for a `HostCopy`. On a host device everything has happened when a call returns.

Every wait has a deadline: a device that does not answer raises `DeviceFailed`, and its process must not go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

from baton.wire.errors import BatonError

Array: TypeAlias = npt.NDArray[Any]
_Outputs = TypeVar("_Outputs")

STEP_TIMEOUT_S = 120.0
"""The time that one step may take on a device before the device counts as lost."""


class DeviceFailed(BatonError):
    """The device cannot compute any more, and the content of its memory must not be used: end the process."""

    code = "internal_error"


class Staging(Protocol):
    """Brings the small arrays of one step to the device in one copy. Used by the engine's thread only.

    The views that `put` returns are valid in stream order from `upload` to the next `begin`. A sequence of puts with
    equal dtypes and capacities gets the same addresses in every step, which is what recorded graphs rely on.
    """

    def begin(self) -> None:
        """Begin a new step; waits until the device has finished the last upload."""
        ...

    def put(self, values: Array, capacity: int = 0) -> Tensor:
        """A view [len(values)] on the device of `values` [n]; room is kept for `capacity` values (at least n).

        `values` is copied now. Raises `ValueError` when the staging memory is too small.
        """
        ...

    def upload(self) -> None:
        """Issue the copy of everything that was put, without waiting for it."""
        ...


class HostCopy(Protocol):
    """A copy of results to the host that is in flight."""

    def wait(self, timeout_s: float = STEP_TIMEOUT_S) -> tuple[Array, ...]:
        """The values, once they are here. Raises `DeviceFailed` at the timeout, or when the device has failed."""
        ...


class Graph(Protocol):
    """A recorded sequence of operations over fixed addresses."""

    def replay(self) -> None:
        """Issue all operations again; they read what the inputs hold at that time."""
        ...


class Device(Protocol):
    """One device, as the engine's thread uses it.

    `torch_device`: where tensors go. `has_own_memory`: transports of the host cannot read tensors in place.
    `is_asynchronous`: the host may prepare a step while the last one runs. `records`: `record` works and makes steps
    faster.
    """

    torch_device: torch.device
    has_own_memory: bool
    is_asynchronous: bool
    records: bool

    def staging(self, num_bytes: int) -> Staging:
        """Staging memory for steps of at most `num_bytes` bytes."""
        ...

    def record(self, run: Callable[[], _Outputs]) -> tuple[Graph, _Outputs]:
        """Record what `run` issues, without computing it, and the tensors it returns: each replay writes those.

        `run` has been called before, so nothing in it is compiled or allocated for the first time. It must not ask
        the device for values.
        """
        ...

    def fetch(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Bring tensors to the host, as they are at this point of the stream. They may be overwritten after it."""
        ...

    def notify(self, call: Callable[[], None]) -> None:
        """Call `call`, on any thread, once everything issued so far has happened. Calls keep the order of `notify`."""
        ...

    def settle(self, timeout_s: float = STEP_TIMEOUT_S) -> None:
        """Wait until every call that `notify` was given has returned. Raises as `HostCopy.wait`."""
        ...

    def issuing(self) -> AbstractContextManager[None]:
        """A context for code that issues work: an error after which the device cannot compute becomes
        `DeviceFailed`."""
        ...

    def synchronize(self) -> None:
        """Wait until nothing issued is left to do. For start and measurements, not for steps."""
        ...

    def close(self) -> None:
        """End the device's own threads."""
        ...
