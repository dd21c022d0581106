"""Formats in which the weight of a matrix product can lie in memory.

A loaded weight is plain, quantized, or a stack of such. Every method in which checkpoints are quantized
(`baton.engine.models.quantization`) becomes a `QuantizedWeight`, so operations need to know one vocabulary only.
Formats that only a device's kernels read have nothing to load: `DecoderOps.pack` makes them of loaded ones, and the
`linear` of the same operations multiplies by them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from baton.engine.models.parameters import Parameter

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_NUMBERS = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))
"""What the codes of float4_e2m1fn_x2 stand for."""


class LinearWeight(Protocol):
    """W [out, in] in some format."""

    def parameters(self) -> tuple[Parameter, ...]:
        """The tensors that loading fills; none for a format that is made of another."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PlainWeight:
    """`matrix`: [out, in] in the model's dtype. `filled`: how it is loaded, nothing where it belongs to another part
    (a tied head)."""

    matrix: Tensor
    filled: tuple[Parameter, ...] = ()

    def parameters(self) -> tuple[Parameter, ...]:
        """The tensors that a checkpoint fills."""
        return self.filled

    def loaded(self) -> PlainWeight:
        """This weight itself, once it is filled."""
        return PlainWeight(self.matrix)

    @property
    def num_rows(self) -> int:
        """The number of outputs, which are the rows of the matrix."""
        return self.matrix.shape[0]

    def reordered(self, order: Tensor) -> PlainWeight:
        """A weight with the rows of this one in `order`."""
        return PlainWeight(self.matrix[order.to(self.matrix.device)])

    def plain(self, dtype: torch.dtype) -> Tensor:
        """W [out, in] in `dtype`."""
        return self.matrix.to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """W[n, k] = scales[n, g] * code[n, k] + offsets[n, g], with g = k / group_size.

    `codes`: int8 [out, in]; or float8_e4m3fn [out, in]; or with two codes in a byte, the first in the lower half,
    float4_e2m1fn_x2 [out, in / 2] or uint8 [out, in / 2], where 0 to 15 stand for -8 to 7. `scales`, `offsets` (None:
    zeros): [out, in / group_size] float32. `dtype`: of what it multiplies. `input_order` [in]: the input that each
    column multiplies, None for their own order.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    group_size: int
    dtype: torch.dtype
    input_order: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """The number of outputs, which are the rows of the matrix."""
        return self.codes.shape[0]

    @property
    def num_in(self) -> int:
        """The number of inputs, which are the columns of the matrix."""
        return self.scales.shape[1] * self.group_size

    def parameters(self) -> tuple[Parameter, ...]:
        """No parameters: its tensors are made of those that a quantization method has loaded."""
        return ()

    def loaded(self) -> QuantizedWeight:
        """This weight itself."""
        return self

    def reordered(self, order: Tensor) -> QuantizedWeight:
        """A weight with the rows of this one in `order`."""
        order = order.to(self.codes.device)
        offsets = None if self.offsets is None else self.offsets[order]
        return replace(self, codes=_rows(self.codes, order), scales=self.scales[order], offsets=offsets)

    def plain(self, dtype: torch.dtype) -> Tensor:
        """W [out, in] in `dtype`, each element rounded once."""
        wide = _numbers(self.codes).view(self.num_rows, -1, self.group_size) * self.scales[:, :, None]
        if self.offsets is not None:
            wide += self.offsets[:, :, None]
        matrix = wide.view(self.num_rows, self.num_in).to(dtype)
        if self.input_order is None:
            return matrix
        return torch.empty_like(matrix).index_copy_(1, self.input_order, matrix)


@dataclass(frozen=True, slots=True, eq=False)
class StackedWeight:
    """Weights of the same inputs, whose outputs lie side by side: those of a fused product that are quantized in
    different ways."""

    pieces: tuple[LinearWeight, ...]

    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters of all pieces, in order."""
        return tuple(parameter for piece in self.pieces for parameter in piece.parameters())


LoadedWeight: TypeAlias = PlainWeight | QuantizedWeight
"""What loading leaves, and `DecoderOps.pack` takes."""


def _numbers(codes: Tensor) -> Tensor:
    """What codes stand for, float32 [out, in]."""
    if codes.dtype in (torch.int8, torch.float8_e4m3fn):
        return codes.to(torch.float32)
    halves = codes.view(torch.uint8)
    numbers = torch.stack((halves & 15, halves >> 4), dim=-1).flatten(1).to(torch.int32)
    if codes.dtype == torch.uint8:
        return numbers.to(torch.float32) - 8
    return torch.tensor(E2M1_NUMBERS, device=codes.device)[numbers]


def _rows(codes: Tensor, order: Tensor) -> Tensor:
    # torch cannot index floats of 8 bits everywhere
    return codes.view(torch.uint8)[order].view(codes.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """`blocked`: opaque, in the layout of oneDNN's kernels. Without it every product brings W into that layout first,
    which at decode sizes costs more than the product."""

    blocked: Tensor

    def parameters(self) -> tuple[Parameter, ...]:
        """No parameters: it is made of a loaded weight."""
        return ()
