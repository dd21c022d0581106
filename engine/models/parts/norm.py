"""RMS norms: of the residual stream, and of the heads of queries and keys.

Letters: T tokens of the step, E hidden size, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from engine.models.parameters import Parameter, Source, whole
from engine.models.parts.base import PartSetup
from engine.models.rope import Rotation


class ResidualNorm:
    """The norm that a layer's attention, its MLP or the head begins with. See `Part`."""

    def __init__(self, name: str, tensor: str, size: int, eps: float, setup: PartSetup) -> None:
        """`name` of the parameter, `tensor` of the checkpoint's weight [E]."""
        self._weight = setup.empty(size)
        source = Source(tensor, (size,), whole((size,)), whole((size,)))
        self._parameter = Parameter(name, self._weight, (source,), center=1.0)
        self._eps = eps
        self._ops = setup.ops

    def __call__(self, residual: Tensor, delta: Tensor | None) -> Tensor:
        """Add `delta` [T, E] to `residual` [T, E] in place; the norm of the sum [T, E]."""
        return self._ops.add_norm(residual, delta, self._weight, self._eps)

    def parameters(self) -> Iterator[Parameter]:
        """See `Part.parameters`."""
        yield self._parameter

    def pack(self) -> None:
        """See `Part.pack`: norms have one format."""


class HeadRotation:
    """Norm, where the model has one, and rotation of queries and keys, head by head. See `Part`."""

    def __init__(self, name: str, norms: Mapping[str, int], head_dim: int, eps: float, setup: PartSetup) -> None:
        """`norms`: for neighbouring heads the checkpoint's weight [D] and how many heads it is for; empty for none."""
        self._eps = eps
        self._ops = setup.ops
        self._parameter: Parameter | None = None
        self._weight: Tensor | None = None
        if norms:
            # one row a head, so that all of them are normed in one call
            self._weight = setup.empty(sum(norms.values()), head_dim)
            sources = []
            first = 0
            for tensor, num_heads in norms.items():
                region = (range(first, first + num_heads), range(head_dim))
                sources.append(Source(tensor, (head_dim,), whole((head_dim,)), region))
                first += num_heads
            self._parameter = Parameter(name, self._weight, tuple(sources), center=1.0)

    def __call__(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[T, H, D] of x [T, H, D]."""
        return self._ops.norm_rotate(x, self._weight, self._eps, rotation)

    def parameters(self) -> Iterator[Parameter]:
        """See `Part.parameters`."""
        if self._parameter is not None:
            yield self._parameter

    def pack(self) -> None:
        """See `Part.pack`: norms have one format."""
