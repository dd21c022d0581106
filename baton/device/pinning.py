"""Host memory that a device copies from and to directly, for as long as a pin lasts.

Owns the contract, and the pin of memory that is not registered with any device. Imports no torch: pools in host memory
need this too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Pin(Protocol):
    """Host memory that a device may copy from and to directly, until `close`."""

    @property
    def is_direct(self) -> bool:
        """Whether the device really copies directly."""
        ...

    def close(self) -> None:
        """Unpin the memory; must be called before the memory is unmapped."""
        ...


@dataclass(frozen=True, slots=True)
class HostPin:
    """A pin that registered nothing. `is_direct` is true on the CPU, which reaches all memory, and false where a
    device's driver refused the memory."""

    is_direct: bool = True

    def close(self) -> None:
        """Do nothing: no memory was registered."""
