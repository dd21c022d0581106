"""Norms: of the residual stream, of what is added to it, and of the heads of queries and keys.

Letters: T tokens of the step, E hidden size, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from baton.engine.models.config import ModelConfig
from baton.engine.models.parameters import Parameter, Source, whole
from baton.engine.models.parts.base import Part, PartSetup
from baton.engine.models.rope import Rotation

OFFSET = "offset_rms"
"""The kind of norm whose weight is an offset from 1."""


class StreamNorm(Part, Protocol):
    """A norm of rows of the residual stream, or of what is to be added to it."""

    def __call__(self, residual: Tensor, delta: Tensor | None) -> Tensor:
        """Add `delta` [T, E] to `residual` [T, E] in place; the norm of the sum [T, E]."""
        ...


def make_norm(name: str, tensor: str, config: ModelConfig, setup: PartSetup) -> StreamNorm:
    """The norm of the model's kind. `name` of its parameters, `tensor` without its ending."""
    size, eps = config.hidden_size, config.rms_norm_eps
    if config.norm == OFFSET:
        return OffsetNorm(name, f"{tensor}.weight", size, eps, setup)
    if config.norm == "rms":
        return ResidualNorm(name, f"{tensor}.weight", size, eps, setup)
    return LayerNorm(name, tensor, size, eps, setup, has_bias=config.norm == "layer")


class ResidualNorm:
    """The RMS norm that a layer's attention, its MLP or the head begins with. See `StreamNorm`."""

    def __init__(self, name: str, tensor: str, size: int, eps: float, setup: PartSetup) -> None:
        """`name` of the parameter, `tensor` of the checkpoint's weight [E]."""
        self._weight = setup.empty(size)
        self._parameter = _parameter(name, tensor, self._weight, center=1.0)
        self._eps = eps
        self._ops = setup.ops

    def __call__(self, residual: Tensor, delta: Tensor | None) -> Tensor:
        """Add `delta` to `residual` [T, E], if there is one, and return the RMS norm [T, E]."""
        return self._ops.add_norm(residual, delta, self._weight, self._eps)

    def parameters(self) -> Iterator[Parameter]:
        """The weight [E]."""
        yield self._parameter

    def pack(self) -> None:
        """Do nothing: norms have one format."""


class OffsetWeight:
    """The weight of an RMS norm that multiplies by 1 + weight in float32, and rounds once."""

    def __init__(self, name: str, tensor: str, size: int, setup: PartSetup) -> None:
        self._weight = setup.empty(size)
        self.parameter = _parameter(name, tensor, self._weight, center=0.0)

    def factors(self) -> Tensor:
        """The factors 1 + weight, [E] float32."""
        return 1.0 + self._weight.float()


class OffsetNorm:
    """The RMS norm times 1 + weight. See `StreamNorm`."""

    def __init__(self, name: str, tensor: str, size: int, eps: float, setup: PartSetup) -> None:
        self._weight = OffsetWeight(name, tensor, size, setup)
        self._factors: Tensor | None = None
        self._eps = eps

    def __call__(self, residual: Tensor, delta: Tensor | None) -> Tensor:
        """Add `delta` to `residual` [T, E], if there is one, and return the RMS norm [T, E], times 1 + weight."""
        assert self._factors is not None  # packed
        if delta is not None:
            residual.add_(delta)
        normed = F.rms_norm(residual.float(), residual.shape[-1:], None, self._eps)
        return normed.mul_(self._factors).to(residual.dtype)

    def parameters(self) -> Iterator[Parameter]:
        """The weight [E], which is an offset from 1."""
        yield self._weight.parameter

    def pack(self) -> None:
        """Make factors of the weight, which is an offset from 1."""
        self._factors = self._weight.factors()


class LayerNorm:
    """The norm to mean 0 and variance 1, times a weight, plus a bias where the model has one. See `StreamNorm`."""

    def __init__(self, name: str, tensor: str, size: int, eps: float, setup: PartSetup, *, has_bias: bool) -> None:
        self._weight, self._bias = setup.empty(size), setup.empty(size) if has_bias else None
        self._parameters = [_parameter(f"{name}.weight", f"{tensor}.weight", self._weight, center=1.0)]
        if self._bias is not None:
            self._parameters.append(_parameter(f"{name}.bias", f"{tensor}.bias", self._bias, center=0.0))
        self._eps = eps

    def __call__(self, residual: Tensor, delta: Tensor | None) -> Tensor:
        """Add `delta` to `residual` [T, E], if there is one, and return the layer norm [T, E]."""
        if delta is not None:
            residual.add_(delta)
        return F.layer_norm(residual, residual.shape[-1:], self._weight, self._bias, self._eps)

    def parameters(self) -> Iterator[Parameter]:
        """The weight [E], and the bias if there is one."""
        yield from self._parameters

    def pack(self) -> None:
        """Do nothing: norms have one format."""


class HeadRotation:
    """Norm, where the model has one, and rotation of queries and keys, head by head. See `Part`."""

    def __init__(
        self,
        name: str,
        norms: Mapping[str, int],
        head_dim: int,
        eps: float,
        setup: PartSetup,
        order: Tensor | None = None,
    ) -> None:
        """`norms`: for neighbouring heads the checkpoint's weight [D] and how many heads it is for; empty for none.
        `order` [D]: of a head's elements after loading."""
        self._eps = eps
        self._ops = setup.ops
        self._order = order
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
        """The normed and rotated heads of queries and keys: [T, H, D] of x [T, H, D]."""
        return self._ops.norm_rotate(x, self._weight, self._eps, rotation)

    def parameters(self) -> Iterator[Parameter]:
        """The norm's weight, if the model norms heads."""
        if self._parameter is not None:
            yield self._parameter

    def pack(self) -> None:
        """Bring the norm's weight into the order in which the elements of heads lie."""
        if self._weight is not None and self._order is not None:
            self._weight = self._weight[:, self._order.to(self._weight.device)].contiguous()


def _parameter(name: str, tensor: str, weight: Tensor, center: float) -> Parameter:
    shape = tuple(weight.shape)
    return Parameter(name, weight, (Source(tensor, shape, whole(shape), whole(shape)),), center=center)
