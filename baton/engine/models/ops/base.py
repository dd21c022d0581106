"""The operations of a decoder: one contract, which each kind of device implements.

Owns the contract alone. `torch_ops.py` defines the results, rounding included, as transformers rounds; `choose.py`
chooses by device. An implementation knows no layers and no files.

Letters: T tokens of the step, V vocabulary, E hidden size, I intermediate size, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from baton.engine.attention.base import StatePiece
from baton.engine.models.linear_weights import LinearWeight, LoadedWeight
from baton.engine.models.ops.delta_rule import DeltaHeads
from baton.engine.models.rope import Rotation


class DecoderOps(Protocol):
    """The operations of a decoder. All tensors are on one device, in the model's dtype.

    Arithmetic within an operation is float32; results are rounded to the dtype after each step that a description
    names. Rows (tokens) of an argument may be any distance apart, and a row is contiguous. Results are new contiguous
    tensors. The host reads nothing back, so all of it can be recorded in a graph.
    """

    def pack(self, weight: LoadedWeight) -> LinearWeight:
        """A loaded weight in the format that `linear` multiplies by fastest; the weight itself if there is no other.
        One that is quantized stays as small as it is.

        It is called once for each weight, and takes no memory where the format is the same.
        """
        ...

    def linear(self, x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
        """x W^T + b: [T, out] of x [T, in]. `weight`: plain, as `pack` has returned it, or a stack of such. Raises
        `TypeError` for a format that these operations do not multiply by.

        A quantized weight either keeps its scales in float32 here, or is rounded to the dtype of x before it
        multiplies: `TorchOps` does that."""
        ...

    def embed(self, token_ids: Tensor, table: LinearWeight) -> Tensor:
        """The rows [T, E] of `table` [V, E] for `token_ids` [T] int64. The caller may change them."""
        ...

    def has_rows(self, weight: LinearWeight) -> bool:
        """Whether `embed` takes a table of that format."""
        ...

    def add_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add `delta` [T, E] to `residual` [T, E] in place, rounded, and return the RMS norm [T, E] of the sum. Without
        delta the residual stays as it is.

        The norm is x / sqrt(mean(x^2) + eps), rounded, times `weight` [E], rounded.
        """
        ...

    def norm_rotate(self, x: Tensor, weight: Tensor | None, eps: float, rotation: Rotation) -> Tensor:
        """The rotation of x [T, H, D], with `weight` [H, D] that of its RMS norm, taken head by head as in `add_norm`.

        Rotated is x * cos, rounded, plus each element's partner * signed sin, rounded; the sum is rounded.
        """
        ...

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate), rounded, times up, rounded: [T, I] of `gate_up` [T, 2 I], which holds gate first."""
        ...

    def carry_on(self, matrices: Tensor, pieces: Sequence[StatePiece], heads: DeltaHeads) -> Tensor:
        """What the tokens of a step read of the matrices of a gated delta net: float32 [T, Hv, Dv].

        `matrices`, float32 [B, Hv, Dk, Dv], are brought up to date. Heads of a block lie one after another."""
        ...
