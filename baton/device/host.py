"""The host as a device: tensors in memory, every operation done when its call returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from baton.device.base import STEP_TIMEOUT_S, Array, Graph

_Outputs = TypeVar("_Outputs")
_NO_TRANSLATION = nullcontext()


class HostStaging:
    """Staging without a copy: arrays become tensors in place."""

    def begin(self) -> None:
        """Do nothing: there is no upload to wait for."""

    def put(self, values: Array, capacity: int = 0) -> Tensor:
        """A tensor over the memory of `values` [n]; `capacity` is not needed."""
        return torch.from_numpy(values if values.flags.c_contiguous else np.ascontiguousarray(values))

    def upload(self) -> None:
        """Do nothing: the tensors are in place."""


@dataclass(frozen=True, slots=True)
class PresentCopy:
    """Values that are on the host already."""

    values: tuple[Array, ...]

    def wait(self, timeout_s: float = STEP_TIMEOUT_S) -> tuple[Array, ...]:
        """The values, at once."""
        return self.values


class HostDevice:
    """The CPU as a device: every operation is done when its call returns."""

    torch_device = torch.device("cpu")
    has_own_memory = False
    is_asynchronous = False
    records = False

    def staging(self, num_bytes: int) -> HostStaging:
        """Staging that needs no memory of its own."""
        return HostStaging()

    def record(self, run: Callable[[], _Outputs]) -> tuple[Graph, _Outputs]:
        """Raise `NotImplementedError`: a host records no graphs (`records` is false)."""
        raise NotImplementedError

    def fetch(self, tensors: Sequence[Tensor]) -> PresentCopy:
        """The tensors themselves as arrays, not copied."""
        return PresentCopy(tuple(tensor.numpy() for tensor in tensors))

    def notify(self, call: Callable[[], None]) -> None:
        """Call `call` at once, on this thread."""
        call()

    def settle(self, timeout_s: float = STEP_TIMEOUT_S) -> None:
        """Do nothing: each call was made within `notify`."""

    def issuing(self) -> AbstractContextManager[None]:
        """A context that translates no errors."""
        return _NO_TRANSLATION

    def synchronize(self) -> None:
        """Do nothing: no work is ever open."""

    def close(self) -> None:
        """Do nothing: there is no thread."""
