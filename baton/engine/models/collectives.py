"""What the ranks of a model do together: add up their shares, put them side by side, and learn what the first of them
has found out. The contract alone.

Owns nothing but the contract; `baton.ranks.executor.world` keeps it. Every rank makes the same calls in the same order
with tensors of the same shape. On the host a call returns when all ranks have made it; on a GPU it is issued in the
order of the engine's stream, like any other operation, and may be recorded with them.

Letters: N rows, W columns of a rank's share, R ranks.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """Calls among the ranks of one model. Each raises `DeviceFailed` when a rank is gone or does not call in time."""

    def add_up(self, summand: Tensor) -> Tensor:
        """The sum of all ranks' `summand`, which is overwritten with it and returned. The same bits on every rank."""
        ...

    def side_by_side(self, share: Tensor) -> Tensor:
        """The `share` [N, W] of every rank in the order of ranks, [N, R * W], on the first rank. The others get their
        own share back: they have no use for the whole."""
        ...

    def from_first(self, values: Tensor) -> None:
        """Overwrite every rank's `values` with those of the first."""
        ...
