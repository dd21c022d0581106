"""Grouped-query attention: projections, head norms, rotation, and the KV that each token stores in the pool.

Attention over the tokens of a request is the step's `Attention`, which knows which token attends to which. A model with
another attention (latent, state) has another class here, with another `kv`.

Letters: T tokens of the step, E hidden size, Hq query heads, Hkv key and value heads (of this rank), D head size.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from engine.attention.base import Attention
from engine.models.config import ModelConfig
from engine.models.parameters import Parameter
from engine.models.parts.base import PartSetup
from engine.models.parts.linear import Linear, Matrix
from engine.models.parts.norm import HeadRotation
from engine.models.rope import Rotation
from engine.models.shard import scaled
from wire.layout import LayerKv


class GroupedQueryAttention:
    """The attention of one layer. See `Part`. `kv`: what it stores of each token."""

    def __init__(self, layer: int, config: ModelConfig, setup: PartSetup) -> None:
        name, tensors, size = f"layers.{layer}", f"model.layers.{layer}.self_attn", config.head_dim
        heads = setup.shard.share_of(config.num_heads, "attention heads")
        kv_heads = setup.shard.kv_heads_of(config.num_kv_heads)
        self.kv = LayerKv(len(kv_heads), size, config.windows[layer])
        self._layer = layer
        self._num_heads = len(heads)
        self._num_rotated = len(heads) + len(kv_heads)
        self._fused_shape = (self._num_rotated + len(kv_heads), size)
        matrices = [
            Matrix(f"{tensors}.q_proj", config.num_heads * size, scaled(heads, size)),
            Matrix(f"{tensors}.k_proj", config.num_kv_heads * size, scaled(kv_heads, size)),
            Matrix(f"{tensors}.v_proj", config.num_kv_heads * size, scaled(kv_heads, size)),
        ]
        self._qkv = Linear.column_parallel(f"{name}.qkv", matrices, config.hidden_size, config.qkv_bias, setup)
        norms = {f"{tensors}.q_norm.weight": len(heads), f"{tensors}.k_norm.weight": len(kv_heads)}
        self._rotation = HeadRotation(
            f"{name}.qk_norm", norms if config.qk_norm else {}, size, config.rms_norm_eps, setup
        )
        self._o = Linear.row_parallel(
            f"{name}.o",
            f"{tensors}.o_proj",
            config.hidden_size,
            config.num_heads * size,
            scaled(heads, size),
            config.o_bias,
            setup,
        )

    def __call__(self, x: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        """The attention's summand for the residual stream, [T, E] of x [T, E]."""
        num_tokens = x.shape[0]
        fused = self._qkv(x).view(num_tokens, *self._fused_shape)
        # q and k are neighbours in the fused output: norm and rotation take both in one call.
        qk = self._rotation(fused[:, : self._num_rotated], rotation)
        q, k, v = qk[:, : self._num_heads], qk[:, self._num_heads :], fused[:, self._num_rotated :]
        attended = attention.run(self._layer, q, k, v)
        return self._o(attended.flatten(1))

    def parameters(self) -> Iterator[Parameter]:
        """See `Part.parameters`."""
        yield from self._qkv.parameters()
        yield from self._rotation.parameters()
        yield from self._o.parameters()

    def pack(self) -> None:
        """See `Part.pack`."""
        self._qkv.pack()
        self._o.pack()
