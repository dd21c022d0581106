"""The CPU kernels alone, without an engine around them: `attn_kernel_ratio`, `linear_bw_ratio`, `linear_flop_ratio`.

Owns the arguments of the kernels' calls, weights and blocks that no cache holds, and the same products by the library
(oneDNN where torch has it). Does not know which rates they are compared with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.bench.limits.model_shapes import ModelShapes, Product
from baton.engine.attention.native_backend import layer_kv
from baton.engine.attention.paged_kv import PagedKv
from baton.engine.models.linear_weights import PlainWeight
from baton.engine.models.ops.native_ops import NativeOps, NativeWeight
from baton.engine.native.arguments import BatonAttention, BatonLinear
from baton.engine.native.library import Kernels

FEW_ROWS, MANY_ROWS = (1, 2, 4, 8), (16, 64, 512)
"""Rows of products that are bound by memory, and of those that are bound by the processor at last."""
Call: TypeAlias = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Work:
    """Calls that follow one another, and what all of them have to read and to compute. `held`: what they point to."""

    calls: Sequence[Call]
    num_bytes: int
    flop: int
    held: object = None

    def run_s(self) -> float:
        """The time of one pass."""
        begin_s = time.monotonic()
        for call in self.calls:
            call()
        return time.monotonic() - begin_s


class KernelsAlone:
    """`num_bytes`: what a pass over weights reads at least, and one over KV at most once it has read a whole step."""

    def __init__(self, kernels: Kernels, shapes: ModelShapes, dtype: torch.dtype, num_bytes: int) -> None:
        self._kernels, self._shapes, self._dtype, self._num_bytes = kernels, shapes, dtype, num_bytes
        self._ops = NativeOps(kernels)

    def attention(self, pool: PagedKv, batch: int, context: int) -> Work:
        """Decode steps of all layers, each over other blocks of `pool`, from the first one on."""
        shapes, block_size = self._shapes, pool.layout.block_size
        count = -(-context // block_size)
        step_bytes = batch * shapes.kv_read_bytes(context)
        num_steps = max(1, min(self._num_bytes // step_bytes, len(pool.blocks) // (batch * count)))
        tables = (torch.arange(num_steps * batch * count) % len(pool.blocks)).view(num_steps, -1)
        first, begin = torch.arange(batch), torch.arange(batch) * count
        start, ones = torch.full((batch,), context - 1), torch.ones(batch, dtype=torch.int64)
        q = torch.randn(batch, shapes.num_heads, shapes.head_dim).to(self._dtype)
        out = torch.empty_like(q)
        scratch = torch.empty(64 + self._kernels.attention_scratch(batch, shapes.head_dim), dtype=torch.uint8)
        steps = [
            BatonAttention(
                layer_kv(pool, layer, self._dtype),
                out.data_ptr(),
                q.data_ptr(),
                q.stride(0),
                first.data_ptr(),
                start.data_ptr(),
                ones.data_ptr(),
                begin.data_ptr(),
                table.data_ptr(),
                batch,
                scratch.data_ptr() + -scratch.data_ptr() % 64,
                shapes.head_dim**-0.5,
                shapes.num_heads,
                window or 0,
            )
            for table in tables
            for layer, window in enumerate(shapes.windows)
        ]
        calls = [lambda step=step: self._kernels.attention(step) for step in steps]
        return Work(calls, num_steps * step_bytes, 0, (tables, first, begin, start, ones, q, out, scratch))

    def products(self, num_rows: int) -> Work:
        """A layer's products and, for few rows, the head: as often as it takes for so many bytes."""
        products = self._layer(num_rows)
        calls, held = [], []
        for product in products:
            x = torch.randn(num_rows, product.num_in).to(self._dtype)
            weight = self._ops.pack(PlainWeight(torch.full((product.num_out, product.num_in), 0.01, dtype=self._dtype)))
            assert isinstance(weight, NativeWeight)
            out = torch.empty(num_rows, product.num_out, dtype=self._dtype)
            call = BatonLinear.from_buffer_copy(weight.product)
            call.out, call.x, call.num_tokens, call.x_stride = out.data_ptr(), x.data_ptr(), num_rows, product.num_in
            calls.append(lambda call=call: self._kernels.linear(call))
            held.append((x, weight, out))
        return self._work(products, calls, held)

    def library_products(self, num_rows: int) -> Work:
        """The same by the library."""
        products = self._layer(num_rows)
        return self._work(products, [library_product(product, self._dtype) for product in products], None)

    def _layer(self, num_rows: int) -> list[Product]:
        products = self._shapes.layer_products(num_rows)
        if num_rows <= max(FEW_ROWS):
            products.append(Product("head", num_rows, self._shapes.hidden_size, self._shapes.vocab_size, 1))
        once = sum(map(self._weight_bytes, products))
        return products * -(-self._num_bytes // once)

    def _work(self, products: list[Product], calls: Sequence[Call], held: object) -> Work:
        flop = sum(2 * product.num_rows * product.num_in * product.num_out for product in products)
        return Work(calls, sum(map(self._weight_bytes, products)), flop, held)

    def _weight_bytes(self, product: Product) -> int:
        return product.num_in * product.num_out * self._dtype.itemsize


@torch.inference_mode()
def library_product(product: Product, dtype: torch.dtype) -> Callable[[], Tensor]:
    """The fastest product of the library at this shape: weights in the layout it likes best for so many rows."""
    rows = torch.randn(product.num_rows, product.num_in).to(dtype)
    weight = torch.randn(product.num_out, product.num_in).to(dtype)
    if dtype != torch.bfloat16 or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return lambda: F.linear(rows, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, product.num_rows)
    linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise
    return lambda: linear(rows, packed, None, "none", [], "")
