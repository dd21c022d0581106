"""What the ranks of a model do together: add up their shares, and put them side by side. The contract alone.

Owns nothing but the contract; `engine.executor.world` keeps it. Every rank makes the same calls in the same order with
tensors of the same shape: a call returns when all ranks have made it.

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
        """[N, R * W]: the `share` [N, W] of every rank in the order of ranks, on the first rank. The others get their
        own share back: they have no use for the whole."""
        ...
