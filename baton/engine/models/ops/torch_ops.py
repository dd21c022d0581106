"""The operations of a decoder in plain torch, on any device: what all other implementations are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.attention.base import StatePiece
from baton.engine.models.linear_weights import LinearWeight, LoadedWeight, PlainWeight, QuantizedWeight, StackedWeight
from baton.engine.models.ops.delta_rule import DeltaHeads, carry_on_pieces
from baton.engine.models.rope import Rotation, rotate


class TorchOps:
    """A decoder's operations in plain torch: the reference for all others."""

    def pack(self, weight: LoadedWeight) -> LinearWeight:
        """The weight itself. A quantized one is made plain again for each product."""
        return weight

    def linear(self, x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
        """x W^T + b, [T, out], by torch. Raises `TypeError` for a packed weight."""
        if isinstance(weight, StackedWeight):
            stacked = torch.cat([self.linear(x, piece, None) for piece in weight.pieces], dim=1)
            return stacked if bias is None else stacked.add_(bias)
        if isinstance(weight, QuantizedWeight):
            return F.linear(x, weight.plain(x.dtype), bias)
        if not isinstance(weight, PlainWeight):
            raise TypeError(f"{type(self).__name__} does not multiply by a {type(weight).__name__}")
        return F.linear(x, weight.matrix, bias)

    def embed(self, token_ids: Tensor, table: LinearWeight) -> Tensor:
        """Rows [T, E] of a plain table. Raises `TypeError` for any other."""
        if not isinstance(table, PlainWeight):
            raise TypeError(f"{type(self).__name__} looks nothing up in a {type(table).__name__}")
        return F.embedding(token_ids, table.matrix)

    def has_rows(self, weight: LinearWeight) -> bool:
        """Whether the table is plain."""
        return isinstance(weight, PlainWeight)

    def add_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add `delta` in place, if there is one, then the RMS norm, as two torch operations."""
        if delta is not None:
            residual.add_(delta)
        return _rms_norm(residual, weight, eps)

    def norm_rotate(self, x: Tensor, weight: Tensor | None, eps: float, rotation: Rotation) -> Tensor:
        """The RMS norm, if there is a weight, and the rotation, in torch."""
        if weight is not None:
            x = _rms_norm(x, weight, eps)
        return rotate(x, *rotation)

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of `gate_up` [T, 2 I], in torch: [T, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def carry_on(self, matrices: Tensor, pieces: Sequence[StatePiece], heads: DeltaHeads) -> Tensor:
        """The pieces of a sequence one after another, and single tokens of all sequences at once."""
        return carry_on_pieces(matrices, pieces, heads)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # rms_norm does not get the weight: it would multiply before rounding to the dtype, transformers rounds first.
    return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)
