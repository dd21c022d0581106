"""Host memory that a device copies from and to directly, for as long as a pin lasts.

Owns the contract, and the pin of memory that no device has been told of. Imports no torch: pools in host memory need
this too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Pin(Protocol):
    """Host memory that a device may copy from and to directly, until `close`."""

    @property
    def is_direct(self) -> bool:
        """Whether it really may."""
        ...

    def close(self) -> None:
        """The memory is about to go."""
        ...


@dataclass(frozen=True, slots=True)
class HostPin:
    """See `Pin`: nothing was registered. The CPU copies from and to everything; a device's driver refused the memory
    where it `is_direct` not.
    """

    is_direct: bool = True

    def close(self) -> None:
        """Nothing was done."""
