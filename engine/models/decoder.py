"""The decoder that every family runs: embed, layers, final norm, head. Differences between families are data in
`ModelConfig`.

Owns: the parameters and the order of operations, which follows transformers; what happens between matrix products,
rounding included, is `DecoderOps`. Knows no cache, no batch layout and no sampling: the tokens of all sequences come
flattened, and `Attention` knows who may see whom.

Invariants: nothing here keeps state between steps; parameters are written only by loading, before `pack`. All tensors
are on one device, and nothing is read back from it. The caller runs forward and logits under
`torch.inference_mode()`.

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
from engine.models.ops import DecoderOps, choose_ops
from engine.models.rope import RotaryEmbedding, Rotation

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

    def __init__(self, index: int, config: ModelConfig, placement: Placement, ops: DecoderOps) -> None:
        size, head_dim = config.hidden_size, config.head_dim
        self._index = index
        self._ops = ops
        self._eps = config.rms_norm_eps
        self._num_heads = config.num_heads
        self._num_rotated = config.num_heads + config.num_kv_heads
        self._num_fused = config.num_heads + 2 * config.num_kv_heads
        self._head_dim = head_dim
        self.input_norm = placement.empty(size)
        self.qkv = Linear.empty(size, self._num_fused * head_dim, config.qkv_bias, placement)
        # q's own weight Hq times, then k's: the heads of both are normed in one call.
        self.qk_norm = placement.empty(self._num_rotated, head_dim) if config.qk_norm else None
        self.o = Linear.empty(config.num_heads * head_dim, size, config.o_bias, placement)
        self.mlp_norm = placement.empty(size)
        self.gate_up = Linear.empty(size, 2 * config.intermediate_size, config.mlp_bias, placement)
        self.down = Linear.empty(config.intermediate_size, size, config.mlp_bias, placement)

    def forward(self, residual: Tensor, delta: Tensor | None, rotation: Rotation, attention: Attention) -> Tensor:
        """Add `delta` [T, E], which the layer before returned, and this layer's attention to `residual` [T, E] in
        place. Returns what the MLP adds [T, E], still to be added: one operation adds and takes the next norm."""
        attended = self._attend(self._ops.add_norm(residual, delta, self.input_norm, self._eps), rotation, attention)
        return self._mlp(self._ops.add_norm(residual, attended, self.mlp_norm, self._eps))

    def _attend(self, x: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        num_tokens = x.shape[0]
        fused = self.qkv(x).view(num_tokens, self._num_fused, self._head_dim)
        # q and k are neighbours in the fused output: norm and rotation take both in one call.
        qk = self._ops.norm_rotate(fused[:, : self._num_rotated], self.qk_norm, self._eps, rotation)
        q, k, v = qk[:, : self._num_heads], qk[:, self._num_heads :], fused[:, self._num_rotated :]
        attended = attention.run(self._index, q, k, v)
        return self.o(attended.reshape(num_tokens, self._num_heads * self._head_dim))

    def _mlp(self, x: Tensor) -> Tensor:
        return self.down(self._ops.gate(self.gate_up(x)))

    def linears(self) -> tuple[Linear, ...]:
        return (self.qkv, self.o, self.gate_up, self.down)


class Decoder:
    """One model on one device. Construct, load (`engine.models.weights.load_weights`), then run."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str, ops: DecoderOps | None = None
    ) -> None:
        """Allocates all parameters without setting them. `ops`: `None` for what is fastest on `device`."""
        placement = Placement(dtype, torch.device(device))
        self.config = config
        self.dtype = dtype
        self.device = placement.device
        self._ops = choose_ops(placement.device) if ops is None else ops
        self._rope = RotaryEmbedding(config, placement.device)
        self._layers = [DecoderLayer(index, config, placement, self._ops) for index in range(config.num_layers)]
        self._norm = placement.empty(config.hidden_size)
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
        delta: Tensor | None = None
        for layer in self._layers:
            delta = layer.forward(residual, delta, rotation, attention)
        return residual if delta is None else residual.add_(delta)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V] float32 of rows [N, E] that `forward` returned."""
        normed = self._ops.add_norm(hidden, None, self._norm, self.config.rms_norm_eps)
        return self._head(normed).to(torch.float32)

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter by its name in the fusion table of `engine.models.weights`. Only before `pack`."""
        named = {"embedding": self._embedding, "norm": self._norm}
        if not self.config.tie_word_embeddings:
            named["head.weight"] = self._head.weight
        for index, layer in enumerate(self._layers):
            prefix = f"layers.{index}."
            named[prefix + "input_norm"] = layer.input_norm
            named[prefix + "mlp_norm"] = layer.mlp_norm
            if layer.qk_norm is not None:
                named[prefix + "qk_norm"] = layer.qk_norm
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
