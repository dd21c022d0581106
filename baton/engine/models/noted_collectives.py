"""Calls among ranks that a recording of kernel calls is cut at."""

from __future__ import annotations

from torch import Tensor

from baton.engine.models.collectives import Collectives
from baton.engine.native.library import Kernels


class NotedCollectives:
    """The same calls, of which a recording of `kernels` knows. See `Collectives`."""

    def __init__(self, collectives: Collectives, kernels: Kernels) -> None:
        self._collectives = collectives
        self._kernels = kernels

    def add_up(self, summand: Tensor) -> Tensor:
        """See `Collectives.add_up`."""
        self._kernels.do_between(self._collectives.add_up, summand)
        return summand

    def side_by_side(self, share: Tensor) -> Tensor:
        """See `Collectives.side_by_side`."""
        return self._collectives.side_by_side(share)

    def from_first(self, values: Tensor) -> None:
        """See `Collectives.from_first`: outside of what is recorded."""
        self._collectives.from_first(values)
