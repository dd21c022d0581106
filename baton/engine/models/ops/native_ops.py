"""The operations of a decoder by Baton's own CPU kernels (`baton.engine.native`).

Owns the packed weights. What the kernels have no product for is multiplied as on any CPU. Here an operation is one
call, where torch needs several and passes over memory: at decode sizes, starting them takes longer than they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.attention.base import StatePiece
from baton.engine.models.linear_weights import LinearWeight, LoadedWeight, PlainWeight, QuantizedWeight, StackedWeight
from baton.engine.models.ops.cpu_ops import CpuOps
from baton.engine.models.ops.delta_rule import DeltaHeads
from baton.engine.models.ops.native_quantized import pack_quantized, round_rows
from baton.engine.models.parameters import Parameter
from baton.engine.models.rope import Rotation
from baton.engine.native.arguments import (
    DTYPES,
    NOT_PACKED,
    TOKEN_IDS,
    BatonAddNorm,
    BatonDeltaPiece,
    BatonDeltaRule,
    BatonGate,
    BatonGather,
    BatonLinear,
    BatonNormRotate,
    BatonPack,
    BatonQuantizedLinear,
    BatonRoundedLinear,
)
from baton.engine.native.library import Kernels, WeightMemory

_MAX_HEAD_DIM = 512
_MAX_KEY_DIM = 256
_DTYPES = {number: dtype for dtype, number in DTYPES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class NativeWeight:
    """`packed`: [num_out, num_in] in the layout of the kernels. `product`: the arguments of a product with it, of which
    a call changes those that belong to its tokens. `input_order`: see `QuantizedWeight`."""

    packed: Tensor
    num_out: int
    product: BatonLinear | BatonQuantizedLinear
    input_order: Tensor | None = None

    def parameters(self) -> tuple[Parameter, ...]:
        """No parameters: it is made of a loaded weight."""
        return ()


def gather_of(out: Tensor, table: Tensor | LinearWeight, index: int, rows: Tensor) -> BatonGather:
    """The arguments that copy the rows of `table` [R, E] which `rows` names into the first ones of `out`. Raises
    `TypeError` for a format without rows."""
    if isinstance(table, PlainWeight):
        table = table.matrix
    if isinstance(table, Tensor):
        memory, num_rows, packed_as = table, len(table), NOT_PACKED
    elif isinstance(table, NativeWeight) and isinstance(table.product, BatonLinear):
        memory, num_rows, packed_as = table.packed, table.num_out, table.product.dtype
    else:
        raise TypeError(f"Baton's CPU kernels look nothing up in a {type(table).__name__}")
    row_bytes = out.shape[-1] * out.itemsize
    return BatonGather(
        out.data_ptr(), memory.data_ptr(), rows.data_ptr(), len(rows), row_bytes, num_rows, index, packed_as
    )


class _Inputs:
    """What goes into one product: rows of x, rounded once for all weights that take them so."""

    def __init__(self, kernels: Kernels, x: Tensor) -> None:
        self._kernels, self._x = kernels, x
        self._rounded: Tensor | None = None

    def of(self, weight: NativeWeight) -> Tensor:
        """x in the order and the form that `weight` multiplies."""
        is_rounded = isinstance(weight.product, BatonRoundedLinear)
        if weight.input_order is not None:
            ordered = self._x[:, weight.input_order]
            return round_rows(self._kernels, ordered) if is_rounded else ordered
        if not is_rounded:
            return self._x
        if self._rounded is None:
            self._rounded = round_rows(self._kernels, self._x)
        return self._rounded


def _native(stack: StackedWeight) -> list[NativeWeight] | None:
    """The pieces, if the kernels multiply by all of them."""
    pieces = [piece for piece in stack.pieces if isinstance(piece, NativeWeight)]
    return pieces if len(pieces) == len(stack.pieces) else None


class NativeOps(CpuOps):
    """A decoder's operations by Baton's CPU kernels, for the dtypes of `DTYPES` and heads of at most 512 elements.

    `has_packed_all`: no product was left to torch, so a row of a result is the same whatever the other rows are.
    `has_rounded`: some product rounds what it multiplies.
    """

    def __init__(self, kernels: Kernels, *, rounds_activations: bool = False) -> None:
        """`rounds_activations`: what goes into products with int8, int4 and MXFP4 weights is rounded to 8 bits."""
        super().__init__()
        self.has_packed_all, self.has_rounded = True, False
        self._rounds_activations = rounds_activations
        self.kernels = kernels
        self._memory = WeightMemory()

    def pack(self, weight: LoadedWeight) -> LinearWeight:
        """Pack a weight for the kernels, quantized or plain. A packed weight is a copy; the loaded one is freed with
        its last owner."""
        if isinstance(weight, QuantizedWeight):
            packed, quantized_product = pack_quantized(
                self.kernels, self._memory, weight, for_rounded=self._rounds_activations
            )
            self.has_rounded = self.has_rounded or isinstance(quantized_product, BatonRoundedLinear)
            return NativeWeight(packed, weight.num_rows, quantized_product, weight.input_order)
        matrix = weight.matrix
        num_out, num_in = matrix.shape
        num_bytes = self.kernels.packed_bytes(matrix.dtype, num_out, num_in)
        if num_bytes == 0:
            self.has_packed_all = False
            return super().pack(weight)
        packed, dtype = self._memory.take(num_bytes), DTYPES[matrix.dtype]
        self.kernels.pack(
            BatonPack(packed.data_ptr(), matrix.data_ptr(), num_out, num_in, matrix.stride(0), dtype=dtype)
        )
        product = BatonLinear(packed=packed.data_ptr(), num_out=num_out, num_in=num_in, out_stride=num_out, dtype=dtype)
        return NativeWeight(packed, num_out, product)

    def embed(self, token_ids: Tensor, table: LinearWeight) -> Tensor:
        """Rows [T, E] of a table, read from its packed form where it has one."""
        if not isinstance(table, NativeWeight):
            return super().embed(token_ids, table)
        rows = torch.empty(len(token_ids), table.product.num_in, dtype=_DTYPES[table.product.dtype])
        self.kernels.gather(gather_of(rows, table, TOKEN_IDS, token_ids))
        return rows

    def has_rows(self, weight: LinearWeight) -> bool:
        """Whether `embed` can read the table: packed, and not quantized, or plain."""
        if isinstance(weight, NativeWeight):
            return isinstance(weight.product, BatonLinear)
        return super().has_rows(weight)

    def linear(self, x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
        """x W^T + b, [T, out]. The pieces of a stack write side by side into one result."""
        if isinstance(weight, StackedWeight) and (pieces := _native(weight)) is not None:
            out = self.kernels.empty((x.shape[0], sum(piece.num_out for piece in pieces)), x.dtype)
            first, inputs = 0, _Inputs(self.kernels, x)
            for piece in pieces:
                end = first + piece.num_out
                self._multiply(out[:, first:end], inputs, piece, None if bias is None else bias[first:end])
                first = end
            return out
        if not isinstance(weight, NativeWeight):
            return super().linear(x, weight, bias)
        out = self.kernels.empty((x.shape[0], weight.num_out), x.dtype)
        self.multiply(out, x, weight, bias)
        return out

    def multiply(self, out: Tensor, x: Tensor, weight: NativeWeight, bias: Tensor | None) -> None:
        """Write x W^T + b to `out` [T, out], whose rows may lie any distance apart."""
        self._multiply(out, _Inputs(self.kernels, x), weight, bias)

    def _multiply(self, out: Tensor, inputs: _Inputs, weight: NativeWeight, bias: Tensor | None) -> None:
        x, product = inputs.of(weight), weight.product
        product.out, product.x = out.data_ptr(), x.data_ptr()
        product.num_tokens, product.x_stride, product.out_stride = x.shape[0], x.stride(0), out.stride(0)
        product.bias = None if bias is None else bias.data_ptr()
        if isinstance(product, BatonLinear):
            self.kernels.linear(product)
        elif isinstance(product, BatonRoundedLinear):
            self.kernels.rounded_linear(product)
        else:
            self.kernels.quantized_linear(product)

    def add_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add and norm in one kernel call over all rows."""
        num_rows, size = residual.shape
        out = self.kernels.empty((num_rows, size), residual.dtype)
        self.kernels.add_norm(
            BatonAddNorm(
                out.data_ptr(),
                residual.data_ptr(),
                None if delta is None else delta.data_ptr(),
                weight.data_ptr(),
                num_rows,
                size,
                size,
                residual.stride(0),
                0 if delta is None else delta.stride(0),
                eps,
                DTYPES[residual.dtype],
            )
        )
        return out

    def norm_rotate(self, x: Tensor, weight: Tensor | None, eps: float, rotation: Rotation) -> Tensor:
        """Norm and rotation in one kernel call; by torch for heads of more than 512 elements."""
        num_tokens, num_heads, head_dim = x.shape
        if head_dim > _MAX_HEAD_DIM:
            return super().norm_rotate(x, weight, eps, rotation)
        cos, signed_sin = rotation
        out = self.kernels.empty(x.shape, x.dtype)
        self.kernels.norm_rotate(
            BatonNormRotate(
                out.data_ptr(),
                x.data_ptr(),
                None if weight is None else weight.data_ptr(),
                cos.data_ptr(),
                signed_sin.data_ptr(),
                num_tokens,
                x.stride(0),
                num_heads,
                head_dim,
                eps,
                DTYPES[x.dtype],
            )
        )
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        """The gated product [T, I] in one kernel call."""
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = self.kernels.empty((num_rows, size), gate_up.dtype)
        self.kernels.gate(
            BatonGate(out.data_ptr(), gate_up.data_ptr(), num_rows, size, gate_up.stride(0), DTYPES[gate_up.dtype])
        )
        return out

    def carry_on(self, matrices: Tensor, pieces: Sequence[StatePiece], heads: DeltaHeads) -> Tensor:
        """All pieces in one kernel call, token by token; by torch for keys of more than 256 elements."""
        num_heads, key_dim, value_dim = matrices.shape[1:]
        if key_dim > _MAX_KEY_DIM or not pieces:
            return super().carry_on(matrices, pieces, heads)
        q, k, v, beta, fading = (part.contiguous() for part in heads)
        keep, out = fading.exp(), torch.empty_like(v)
        begins = [number for number, piece in enumerate(pieces) if piece.level == 0]
        cut = (BatonDeltaPiece * len(pieces))(
            *(
                BatonDeltaPiece(first, last, -1 if before is None else before, block)
                for first, last, before, block, _ in pieces
            )
        )
        begin = torch.tensor([*begins, len(pieces)])
        addresses = [tensor.data_ptr() for tensor in (out, q, k, v, beta, keep, matrices)]
        sizes = (len(begins), matrices.stride(0), num_heads, key_dim, value_dim)
        self.kernels.delta_rule(BatonDeltaRule(*addresses, addressof(cut), begin.data_ptr(), *sizes))
        return out
