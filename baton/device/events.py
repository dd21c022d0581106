"""Points in the order of a stream: recorded there, asked about and waited for by the host, always with a deadline.

Owns how the host waits for a GPU, and how errors of CUDA are described. Used by the engine's device and by the stream
of transfers alike.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from baton.device.base import DeviceFailed

_NAP_S = 2e-5
_TorchEvent: Any = torch.cuda.Event


class Event(Protocol):
    """A point in the order of a stream."""

    def is_passed(self) -> bool:
        """Whether everything that was issued before it has happened. Raises `DeviceFailed`."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait for that; other threads run meanwhile. Raises `DeviceFailed` at the timeout, or when the device has
        failed.
        """
        ...


class PassedEvent:
    """The event of a host, where everything has happened when its call returns."""

    def is_passed(self) -> bool:
        """True, always."""
        return True

    def wait(self, timeout_s: float) -> None:
        """Return at once: nothing is in flight."""


class CudaEvent:
    """A point in the order of a GPU's stream. `record` may be called again and again; the last one counts.

    `spin_s`: for how many seconds a wait only yields before it sleeps, for what takes 0.1 ms. `native`: the event of
    torch.
    """

    def __init__(self, spin_s: float = 0.0, native: Any = None) -> None:
        self._native = _TorchEvent() if native is None else native
        self._spin_s = spin_s

    def record(self, stream: Any = None) -> None:
        """Put the event behind everything issued on `stream` so far; by default the current one of the calling
        thread."""
        self._native.record(stream)

    def is_passed(self) -> bool:
        """Ask the driver, without waiting, whether everything before the event is done. Raises `DeviceFailed`."""
        try:
            return bool(self._native.query())
        except RuntimeError as error:
            raise DeviceFailed(f"the CUDA device failed: {describe_error(error)}") from error

    def wait(self, timeout_s: float) -> None:
        """Poll until the event has passed: spin at first, then sleep in between. Raises `DeviceFailed` after
        `timeout_s` seconds."""
        begun_s = time.monotonic()
        while not self.is_passed():
            waited_s = time.monotonic() - begun_s
            if waited_s > timeout_s:
                raise DeviceFailed(f"the CUDA device did not get anything done for {timeout_s:g} s")
            time.sleep(0.0 if waited_s < self._spin_s else _NAP_S)


def describe_error(error: Exception) -> str:
    """The first line of an error, and of the one before it. A failed recording or a lost device raises at a later call,
    with an error that does not name the cause.
    """
    before = error.__context__
    return _first_line(error) if before is None else f"{_first_line(error)} (after: {_first_line(before)})"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
