"""The decoder that every family runs: embed, layers, final norm, head. Differences between families are data in
`ModelConfig`.

Owns: the parameters and the order of operations, rounding included, which follows transformers. Knows no cache, no
batch layout and no sampling: the tokens of all sequences come flattened, and `Attention` knows who may see whom.

Invariants: nothing here keeps state between steps; parameters are written only by loading, before `pack`. The caller
runs forward and logits under `torch.inference_mode()`.

Letters: T tokens of the step, N rows that need logits, V vocabulary, E hidden size, I intermediate size, Hq query
heads, Hkv key and value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.base import Attention
from engine.models.config import ModelConfig
from engine.models.rope import RotaryEmbedding, rotate

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""The dtypes a decoder runs in, by the names that settings and checkpoints use."""

_PACK_MIN_ELEMENTS = 1 << 17
"""Smaller matrices fit a cache: there the fixed cost of the packed product is more than it saves."""
_PACK_ROWS = 16
"""Row count the packed layout is chosen for. Measured: within a few percent of the best for 1 to 256 rows."""


@dataclass(frozen=True)
class Placement:
    """Where parameters live."""

    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class RMSNorm:
    """x / rms(x) * weight, the mean over the last dimension; division in float32, product in the model's dtype.

    A weight with more dimensions norms several heads in one call: [Hq + Hkv, D] holds q's own weight Hq times, then
    k's.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self._shape = weight.shape[-1:]
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        # rms_norm does not get the weight: it would multiply before rounding to the dtype, transformers rounds first.
        return F.rms_norm(x, self._shape, None, self._eps).mul_(self.weight)


class Linear:
    """x W^T + b with W [out, in]. On a CPU, `pack` puts W into the layout of oneDNN's kernels: without it every
    product repacks W, which at decode sizes costs more than the product."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.is_packed = False

    @classmethod
    def empty(cls, num_in: int, num_out: int, use_bias: bool, placement: Placement) -> Linear:
        """With parameters that are still to be loaded."""
        bias = placement.empty(num_out) if use_bias else None
        return cls(placement.empty(num_out, num_in), bias)

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_packed:
            packed: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return packed
        return F.linear(x, self.weight, self.bias)

    def pack(self, min_elements: int = _PACK_MIN_ELEMENTS) -> None:
        """Replace the weight by its packed form, where this machine has one for its dtype and it is large enough to
        gain."""
        if not self.is_packed and self.weight.numel() >= min_elements and _is_packable(self.weight):
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACK_ROWS)
            self.is_packed = True


def _is_packable(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class DecoderLayer:
    """Attention and MLP of one layer, each added to the residual stream."""

    def __init__(self, index: int, config: ModelConfig, placement: Placement) -> None:
        size, head_dim = config.hidden_size, config.head_dim
        self._index = index
        self._num_heads = config.num_heads
        self._num_rotated = config.num_heads + config.num_kv_heads
        self._num_fused = config.num_heads + 2 * config.num_kv_heads
        self._head_dim = head_dim
        self._intermediate_size = config.intermediate_size
        self.input_norm = RMSNorm(placement.empty(size), config.rms_norm_eps)
        self.qkv = Linear.empty(size, self._num_fused * head_dim, config.qkv_bias, placement)
        self.qk_norm: RMSNorm | None = None
        if config.qk_norm:
            self.qk_norm = RMSNorm(placement.empty(self._num_rotated, head_dim), config.rms_norm_eps)
        self.o = Linear.empty(config.num_heads * head_dim, size, config.o_bias, placement)
        self.mlp_norm = RMSNorm(placement.empty(size), config.rms_norm_eps)
        self.gate_up = Linear.empty(size, 2 * config.intermediate_size, config.mlp_bias, placement)
        self.down = Linear.empty(config.intermediate_size, size, config.mlp_bias, placement)

    def forward(self, residual: Tensor, rotation: tuple[Tensor, Tensor], attention: Attention) -> None:
        """Add this layer's contribution to `residual` [T, E] in place. `rotation` is of `RotaryEmbedding.tables`."""
        residual.add_(self._attend(self.input_norm(residual), rotation, attention))
        residual.add_(self._mlp(self.mlp_norm(residual)))

    def _attend(self, x: Tensor, rotation: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        num_tokens = x.shape[0]
        fused = self.qkv(x).view(num_tokens, self._num_fused, self._head_dim)
        # q and k are neighbours in the fused output: norm and rotation take both in one call.
        qk, v = fused[:, : self._num_rotated], fused[:, self._num_rotated :]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = rotate(qk, *rotation)
        attended = attention.run(self._index, qk[:, : self._num_heads], qk[:, self._num_heads :], v)
        return self.o(attended.reshape(num_tokens, self._num_heads * self._head_dim))

    def _mlp(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up(x)
        gate, up = gate_up[:, : self._intermediate_size], gate_up[:, self._intermediate_size :]
        return self.down(F.silu(gate).mul_(up))

    def linears(self) -> tuple[Linear, ...]:
        return (self.qkv, self.o, self.gate_up, self.down)


class Decoder:
    """One model on one device. Construct, load (`engine.models.weights.load_weights`), then run."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        """Allocates all parameters without setting them."""
        placement = Placement(dtype, torch.device(device))
        self.config = config
        self.dtype = dtype
        self.device = placement.device
        self._rope = RotaryEmbedding(config, placement.device)
        self._layers = [DecoderLayer(index, config, placement) for index in range(config.num_layers)]
        self._norm = RMSNorm(placement.empty(config.hidden_size), config.rms_norm_eps)
        self._embedding = placement.empty(config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            self._head = Linear(self._embedding)
        else:
            self._head = Linear.empty(config.hidden_size, config.vocab_size, False, placement)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Run all layers over the step's tokens.

        token_ids and positions: [T] int64 on this decoder's device, sequences one after another, prompts and decodes
        mixed as `attention` has planned. Returns the residual stream [T, E] before the final norm, which `logits`
        applies to the rows that need it.
        """
        residual = F.embedding(token_ids, self._embedding)
        rotation = self._rope.tables(positions, self.dtype)
        for layer in self._layers:
            layer.forward(residual, rotation, attention)
        return residual

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V] float32 of rows [N, E] that `forward` returned."""
        return self._head(self._norm(hidden)).to(torch.float32)

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter by its name in the fusion table of `engine.models.weights`. Only before `pack`."""
        named = {"embedding": self._embedding, "norm": self._norm.weight}
        if not self.config.tie_word_embeddings:
            named["head.weight"] = self._head.weight
        for index, layer in enumerate(self._layers):
            prefix = f"layers.{index}."
            named[prefix + "input_norm"] = layer.input_norm.weight
            named[prefix + "mlp_norm"] = layer.mlp_norm.weight
            if layer.qk_norm is not None:
                named[prefix + "qk_norm"] = layer.qk_norm.weight
            for name, linear in zip(("qkv", "o", "gate_up", "down"), layer.linears(), strict=True):
                named[f"{prefix}{name}.weight"] = linear.weight
                if linear.bias is not None:
                    named[f"{prefix}{name}.bias"] = linear.bias
        return named

    def pack(self) -> None:
        """Bring the weights into the layout that this device computes with fastest. Call once, after loading;
        parameters cannot be written afterwards. A tied head gets a packed copy of the embedding, since the head is the
        largest product of a decode step and the embedding lookup needs the plain rows."""
        for layer in self._layers:
            for linear in layer.linears():
                linear.pack()
        self._head.pack()
