"""Calls among ranks that a recording of kernel calls is cut at."""

from __future__ import annotations

from torch import Tensor

from baton.engine.models.collectives import Collectives
from baton.engine.native.library import Kernels


class NotedCollectives:
    """The calls of `collectives` among ranks, of which a recording of `kernels` knows. See `Collectives`."""

    def __init__(self, collectives: Collectives, kernels: Kernels) -> None:
        self._collectives = collectives
        self._kernels = kernels

    def add_up(self, summand: Tensor) -> Tensor:
        """The sum over all ranks, computed in place. A recording is cut here, and its replay makes this call, too."""
        self._kernels.do_between(self._collectives.add_up, summand)
        return summand

    def side_by_side(self, share: Tensor) -> Tensor:
        """Gather the shares at once: it is no part of what is recorded."""
        return self._collectives.side_by_side(share)

    def from_first(self, values: Tensor) -> None:
        """Overwrite `values` at once with those of the first rank: it is no part of what is recorded."""
        self._collectives.from_first(values)
