"""Attention over latents (MLA): a token stores one compressed vector for all heads, and one rotated key.

Owns the weights, and the order of products that keeps the stored latents compressed: queries are brought into the space
of the latents, attention reads latents as keys and as values, and what it returns is brought into the space of values.
The KV of a token is [1, C + R]: the normed latent, then the rotated key.

Letters: T tokens of the step, E hidden size, H heads, C latent size, R rotated elements, N elements of a head that are
not rotated, V elements of a head's value.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from baton.engine.attention.base import Attention, LayerRule
from baton.engine.models.config import ModelConfig
from baton.engine.models.latent_settings import LatentSettings
from baton.engine.models.linear_weights import PlainWeight
from baton.engine.models.parameters import Parameter, Source, whole
from baton.engine.models.parts.base import PartSetup
from baton.engine.models.parts.linear import Linear, Matrix
from baton.engine.models.parts.norm import HeadRotation, ResidualNorm
from baton.engine.models.quantization.base import Piece
from baton.engine.models.rope import Rotations, head_order
from baton.engine.models.shard import scaled
from baton.wire.layout import LATENT, LayerKv

_NORM_EPS = 1e-6
"""Of the norms of latents, whatever the file says of the others."""


class LatentAttention:
    """The attention of one layer. See `Part`. `kv`: what it stores of each token; `rule`: how it attends."""

    def __init__(self, layer: int, config: ModelConfig, latent: LatentSettings, rope: int, setup: PartSetup) -> None:
        """`rope`: the number of this layer's rotation among those of a step."""
        name, tensors = f"layers.{layer}", f"{config.names.layer(layer)}.{config.names.attention}"
        heads = setup.shard.share_of(config.num_heads, "attention heads")
        self.kv = LayerKv(1, latent.kv_rank + latent.rope_dim, None, LATENT)
        self.rule = LayerRule(config.multipliers.attention_scale)
        self._place = layer - setup.shard.layers_of(config.num_layers).start
        self._rope, self._latent, self._num_heads = rope, latent, len(heads)
        self._queries = _Queries(name, tensors, config, latent, heads, setup)
        stored = latent.kv_rank + latent.rope_dim
        rows = Matrix(f"{tensors}.kv_a_proj_with_mqa", stored, range(stored))
        order = _order(config, latent.kv_rank, 1)
        self._kv_a = Linear.column_parallel(
            f"{name}.kv_a", [rows], config.hidden_size, config.qkv_bias, setup, row_order=order
        )
        norm = f"{tensors}.kv_a_layernorm.weight"
        self._kv_norm = ResidualNorm(f"{name}.kv_norm", norm, latent.kv_rank, _NORM_EPS, setup)
        self._rotation = HeadRotation(f"{name}.rotation", {}, latent.rope_dim, 0.0, setup)
        self._expansion = _Expansion(name, tensors, config, latent, heads, setup)
        self._o = Linear.row_parallel(
            f"{name}.o",
            f"{tensors}.{config.names.output}",
            config.hidden_size,
            config.num_heads * latent.v_dim,
            scaled(heads, latent.v_dim),
            config.o_bias,
            setup,
        )

    def __call__(self, x: Tensor, rotations: Rotations, attention: Attention) -> Tensor:
        """The attention's summand for the residual stream, [T, E] of x [T, E]."""
        latent = self._latent
        queries = self._queries(x).view(len(x), self._num_heads, latent.nope_dim + latent.rope_dim)
        stored = self._kv_a(x)
        # a latent's row has what is rotated behind it: norms take rows at any distance
        normed = self._kv_norm(stored[:, : latent.kv_rank], None)
        parts = (queries[:, :, latent.nope_dim :], stored[:, None, latent.kv_rank :])
        rotated = self._rotation(torch.cat(parts, dim=1), rotations[self._rope])
        key = torch.cat((normed, rotated[:, -1]), dim=1)[:, None]
        absorbed = self._expansion.queries(queries[:, :, : latent.nope_dim])
        query = torch.cat((absorbed, rotated[:, :-1]), dim=2)
        attended = attention.run(self._place, query, key, key)[:, :, : latent.kv_rank]
        return self._o(self._expansion.values(attended).flatten(1))

    def parameters(self) -> Iterator[Parameter]:
        """The parameters of all products and of the norm of latents."""
        for part in (self._queries, self._kv_a, self._kv_norm, self._expansion, self._o):
            yield from part.parameters()

    def pack(self) -> None:
        """Pack all products, and prepare the norm."""
        for part in (self._queries, self._kv_a, self._kv_norm, self._expansion, self._o):
            part.pack()


class _Queries:
    """Queries [T, H * (N + R)], through a smaller vector where the model has one. See `Part`."""

    def __init__(
        self, name: str, tensors: str, config: ModelConfig, latent: LatentSettings, heads: range, setup: PartSetup
    ) -> None:
        size = latent.nope_dim + latent.rope_dim
        order = _order(config, latent.nope_dim, len(heads))
        matrix = "q_b_proj" if latent.q_rank else "q_proj"
        rows = Matrix(f"{tensors}.{matrix}", config.num_heads * size, scaled(heads, size))
        num_in = latent.q_rank or config.hidden_size
        self._q = Linear.column_parallel(f"{name}.q", [rows], num_in, False, setup, row_order=order)
        self._down: Linear | None = None
        self._norm: ResidualNorm | None = None
        if latent.q_rank:
            down = Matrix(f"{tensors}.q_a_proj", latent.q_rank, range(latent.q_rank))
            self._down = Linear.column_parallel(f"{name}.q_a", [down], config.hidden_size, config.qkv_bias, setup)
            norm = f"{tensors}.q_a_layernorm.weight"
            self._norm = ResidualNorm(f"{name}.q_norm", norm, latent.q_rank, _NORM_EPS, setup)

    def __call__(self, x: Tensor) -> Tensor:
        if self._down is None or self._norm is None:
            return self._q(x)
        return self._q(self._norm(self._down(x), None))

    def parameters(self) -> Iterator[Parameter]:
        yield from self._q.parameters()
        for part in (self._down, self._norm):
            if part is not None:
                yield from part.parameters()

    def pack(self) -> None:
        self._q.pack()
        for part in (self._down, self._norm):
            if part is not None:
                part.pack()


class _Expansion:
    """What a latent expands to, head by head: a key [N] and a value [V]. See `Part`. It is multiplied in the model's
    dtype also where the checkpoint has it quantized: its keys are summed over other dimensions than its values."""

    def __init__(
        self, name: str, tensors: str, config: ModelConfig, latent: LatentSettings, heads: range, setup: PartSetup
    ) -> None:
        both = latent.nope_dim + latent.v_dim
        shape, taken = (config.num_heads * both, latent.kv_rank), (scaled(heads, both), range(latent.kv_rank))
        piece = Piece(f"{name}.kv_b", f"{tensors}.kv_b_proj", shape, *taken, setup.dtype, setup.device)
        self._unread = setup.quantization.unread(piece) or _plain(piece, setup)
        self._sizes = (len(heads), both, latent.kv_rank)
        self._nope_dim, self._dtype = latent.nope_dim, setup.dtype
        self._keys = self._values = setup.empty(0)

    def queries(self, x: Tensor) -> Tensor:
        """[T, H, C]: whose product with a latent is that of x [T, H, N] with the latent's key."""
        return torch.bmm(x.transpose(0, 1), self._keys).transpose(0, 1)

    def values(self, x: Tensor) -> Tensor:
        """The values [T, H, V] of latents x [T, H, C]."""
        return torch.bmm(x.transpose(0, 1), self._values).transpose(0, 1)

    def parameters(self) -> Iterator[Parameter]:
        yield from self._unread.parameters()

    def pack(self) -> None:
        """Both are views of what was loaded: [H, N, C] and [H, C, V]."""
        weight = self._unread.loaded()
        matrix = weight.matrix if isinstance(weight, PlainWeight) else weight.plain(self._dtype)
        self._unread = PlainWeight(matrix)
        by_head = matrix.view(self._sizes)
        self._keys, self._values = by_head[:, : self._nope_dim], by_head[:, self._nope_dim :].transpose(1, 2)


def _plain(piece: Piece, setup: PartSetup) -> PlainWeight:
    tensor = setup.empty(len(piece.rows), len(piece.columns))
    source = Source(f"{piece.tensor}.weight", piece.shape, (piece.rows, piece.columns), whole(tuple(tensor.shape)))
    return PlainWeight(tensor, (Parameter(piece.name, tensor, (source,)),))


def _order(config: ModelConfig, num_before: int, num_heads: int) -> Tensor | None:
    """The order of rows of heads that rotate what lies behind `num_before` elements."""
    order = head_order(config)
    if order is None:
        return None
    of_head = torch.cat((torch.arange(num_before), num_before + order))
    return (torch.arange(num_heads)[:, None] * len(of_head) + of_head).flatten()
