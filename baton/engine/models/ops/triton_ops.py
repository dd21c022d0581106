"""The operations between a decoder's products as Triton kernels: one launch each. The only module that imports triton.

Owns: the kernels and their launch shapes. What they compute and where they round is `DecoderOps` in `base.py`;
arithmetic is in float32 between those roundings. Products and the embedding lookup are torch's.

A kernel is compiled on its first call for a model's sizes and dtype, which takes about a second. The number of tokens
is only ever the size of the grid, never an argument or a reason for another configuration: one step of any length
compiles all there is, and what is recorded in a graph is compiled before. Nothing is tuned by timing.

The current CUDA device must be that of the tensors: unlike torch, Triton launches on the current one.

Letters: T tokens of the step, E hidden size, I intermediate size, H heads, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.models.ops.torch_ops import TorchOps
from baton.engine.models.rope import Rotation

_ELEMENTS_PER_THREAD = 8
"""Two-byte elements of one 16-byte access, the widest there is."""
_WARP_THREADS = 32
_MAX_WARPS = 16
_TILE_ELEMENTS = 512
"""Elements of the first (and of the second) halves of heads that one program of `_norm_rotate` takes."""
_GATE_BLOCK = 1024
_FUSE_ROUNDINGS = False
"""The compiler would make one bfloat16 instruction of a product and the sum it goes into, and skip the rounding between
them: visible in the PTX, not in an interpreter."""


class TritonOps(TorchOps):
    """torch's operations, with Triton kernels for everything between products."""

    def add_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add and norm in one launch, one program for each token."""
        num_tokens, size = residual.shape
        normed = torch.empty((num_tokens, size), dtype=residual.dtype, device=residual.device)
        added = residual if delta is None else delta
        block = triton.next_power_of_2(size)
        _add_norm[(num_tokens,)](
            residual,
            added,
            weight,
            normed,
            residual.stride(0),
            added.stride(0),
            eps,
            size=size,
            block=block,
            has_delta=delta is not None,
            num_warps=_num_warps(block),
            enable_fp_fusion=_FUSE_ROUNDINGS,
        )
        return normed

    def norm_rotate(self, x: Tensor, weight: Tensor | None, eps: float, rotation: Rotation) -> Tensor:
        """Norm and rotation in one launch, one program for a few heads of a token."""
        num_tokens, num_heads, head_dim = x.shape
        cos, signed_sin = rotation
        rotated = torch.empty((num_tokens, num_heads, head_dim), dtype=x.dtype, device=x.device)
        half_block = triton.next_power_of_2(head_dim // 2)
        heads_block = min(triton.next_power_of_2(num_heads), max(_TILE_ELEMENTS // half_block, 1))
        _norm_rotate[(num_tokens, triton.cdiv(num_heads, heads_block))](
            x,
            cos if weight is None else weight,
            cos,
            signed_sin,
            rotated,
            x.stride(0),
            eps,
            num_heads=num_heads,
            half=head_dim // 2,
            heads_block=heads_block,
            half_block=half_block,
            has_weight=weight is not None,
            num_warps=_num_warps(heads_block * half_block),
            enable_fp_fusion=_FUSE_ROUNDINGS,
        )
        return rotated

    def gate(self, gate_up: Tensor) -> Tensor:
        """The gated product in one launch, one program for a piece of a token's row."""
        num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        gated = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
        block = min(triton.next_power_of_2(size), _GATE_BLOCK)
        _gate[(num_tokens, triton.cdiv(size, block))](
            gate_up,
            gated,
            gate_up.stride(0),
            size=size,
            block=block,
            num_warps=_num_warps(block),
            enable_fp_fusion=_FUSE_ROUNDINGS,
        )
        return gated


def _num_warps(num_elements: int) -> int:
    """Warps of a program over `num_elements` elements, a power of two."""
    return min(max(num_elements // (_ELEMENTS_PER_THREAD * _WARP_THREADS), 1), _MAX_WARPS)


# In the kernels below, `token` is int64: token times row does not fit 32 bits for long prompts. Everything within a row
# does. Sizes are constants of the compiled code, so that the alignment of what they are added to is known.


@triton.jit
def _rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    return x.to(dtype).to(tl.float32)


@triton.jit
def _add_norm(
    residual: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    residual_stride: int,
    delta_stride: int,
    eps: float,
    size: tl.constexpr,
    block: tl.constexpr,
    has_delta: tl.constexpr,
) -> None:
    dtype: tl.constexpr = residual.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < size
    x = tl.load(residual + token * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    if has_delta:
        added = tl.load(delta + token * delta_stride + column, mask=inside, other=0.0).to(tl.float32)
        x = _rounded(x + added, dtype)
        tl.store(residual + token * residual_stride + column, x.to(dtype), mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    weights = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + token * size + column, (_rounded(x * scale, dtype) * weights).to(dtype), mask=inside)


@triton.jit
def _norm_rotate(
    x: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    signed_sin: tl.tensor,
    rotated: tl.tensor,
    token_stride: int,
    eps: float,
    num_heads: tl.constexpr,
    half: tl.constexpr,
    heads_block: tl.constexpr,
    half_block: tl.constexpr,
    has_weight: tl.constexpr,
) -> None:
    # A program keeps the halves of its heads apart, each [heads_block, half_block]: an element and its partner are then
    # at the same place of two tiles.
    dtype: tl.constexpr = x.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads_block + tl.arange(0, heads_block)[:, None]
    column = tl.arange(0, half_block)[None, :]
    inside = (head < num_heads) & (column < half)
    place = head * (2 * half) + column
    first = tl.load(x + token * token_stride + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + token * token_stride + half + place, mask=inside, other=0.0).to(tl.float32)
    if has_weight:
        total = tl.sum(first * first + second * second, axis=1)
        scale = tl.rsqrt(total / (2 * half) + eps)[:, None]
        first_weight = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
        second_weight = tl.load(weight + half + place, mask=inside, other=0.0).to(tl.float32)
        first = _rounded(_rounded(first * scale, dtype) * first_weight, dtype)
        second = _rounded(_rounded(second * scale, dtype) * second_weight, dtype)
    # Loaded anew for each head, which costs less than moving one row to the threads that hold the heads.
    angle = token * (2 * half) + column
    first_cos = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    second_cos = tl.load(cos + half + angle, mask=inside, other=0.0).to(tl.float32)
    first_sin = tl.load(signed_sin + angle, mask=inside, other=0.0).to(tl.float32)
    second_sin = tl.load(signed_sin + half + angle, mask=inside, other=0.0).to(tl.float32)
    first_rotated = _rounded(first * first_cos, dtype) + _rounded(second * first_sin, dtype)
    second_rotated = _rounded(second * second_cos, dtype) + _rounded(first * second_sin, dtype)
    target = rotated + token * (num_heads * 2 * half) + place
    tl.store(target, first_rotated.to(dtype), mask=inside)
    tl.store(target + half, second_rotated.to(dtype), mask=inside)


@triton.jit
def _gate(gate_up: tl.tensor, gated: tl.tensor, token_stride: int, size: tl.constexpr, block: tl.constexpr) -> None:
    dtype: tl.constexpr = gate_up.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < size
    gate = tl.load(gate_up + token * token_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * token_stride + size + column, mask=inside, other=0.0).to(tl.float32)
    activated = _rounded(gate / (1.0 + tl.exp(-gate)), dtype)
    tl.store(gated + token * size + column, (activated * up).to(dtype), mask=inside)
