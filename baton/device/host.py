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
    """See `Staging`: there is nothing to copy, so arrays become tensors in place."""

    def begin(self) -> None:
        """See `Staging.begin`."""

    def put(self, values: Array, capacity: int = 0) -> Tensor:
        """See `Staging.put`."""
        return torch.from_numpy(values if values.flags.c_contiguous else np.ascontiguousarray(values))

    def upload(self) -> None:
        """See `Staging.upload`."""


@dataclass(frozen=True, slots=True)
class PresentCopy:
    """See `HostCopy`: values that are here already."""

    values: tuple[Array, ...]

    def wait(self, timeout_s: float = STEP_TIMEOUT_S) -> tuple[Array, ...]:
        """See `HostCopy.wait`."""
        return self.values


class HostDevice:
    """See `Device`."""

    torch_device = torch.device("cpu")
    has_own_memory = False
    is_asynchronous = False
    records = False

    def staging(self, num_bytes: int) -> HostStaging:
        """See `Device.staging`."""
        return HostStaging()

    def record(self, run: Callable[[], _Outputs]) -> tuple[Graph, _Outputs]:
        """Not here: see `records`."""
        raise NotImplementedError

    def fetch(self, tensors: Sequence[Tensor]) -> PresentCopy:
        """See `Device.fetch`."""
        return PresentCopy(tuple(tensor.numpy() for tensor in tensors))

    def notify(self, call: Callable[[], None]) -> None:
        """See `Device.notify`."""
        call()

    def settle(self, timeout_s: float = STEP_TIMEOUT_S) -> None:
        """See `Device.settle`."""

    def issuing(self) -> AbstractContextManager[None]:
        """See `Device.issuing`."""
        return _NO_TRANSLATION

    def synchronize(self) -> None:
        """See `Device.synchronize`."""

    def close(self) -> None:
        """See `Device.close`."""
