"""Grouped-query attention of a layer: from the normed stream to the attention's summand.

Owns what a rank computes of it: the query heads of its share and the key and value heads they attend to. Ranks that
share a key and value head have it each, and store its KV each. In which order a head's rows lie after loading is
`baton.engine.models.rope.head_order`.

Letters: T tokens of the step, E hidden size, Hq query heads, Hkv key and value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from baton.engine.attention.base import Attention, LayerRule
from baton.engine.models.config import ModelConfig
from baton.engine.models.parameters import Parameter, Source
from baton.engine.models.parts.base import PartSetup
from baton.engine.models.parts.head_norm import make_head_rotation
from baton.engine.models.parts.linear import Linear, Matrix
from baton.engine.models.rope import Rotations, head_order
from baton.engine.models.shard import scaled
from baton.engine.models.state_settings import DeltaSettings
from baton.wire.layout import KEY_VALUE, SHORT_KEY_VALUE, LayerKv


class GroupedQueryAttention:
    """The attention of one layer. See `Part`. `kv`: what it stores of each token; `rule`: how it attends."""

    def __init__(self, layer: int, config: ModelConfig, rope: int, setup: PartSetup, num_in: int | None = None) -> None:
        """`rope`: the number of this layer's rotation among those of a step. `num_in`: elements of what it attends
        with; None: the hidden size."""
        name, size = f"layers.{layer}", config.head_dim
        tensors = f"{config.names.layer(layer)}.{config.names.attention}"
        heads = setup.shard.share_of(config.num_heads, "attention heads")
        kv_heads = setup.shard.kv_heads_of(config.num_kv_heads)
        kind = SHORT_KEY_VALUE if config.has_short_context else KEY_VALUE
        self.kv = LayerKv(len(kv_heads), size, config.windows[layer], kind)
        multipliers = config.multipliers
        self._sinks: Parameter | None = None
        if config.names.sinks:
            self._sinks = _sinks(f"{name}.sinks", f"{tensors}.{config.names.sinks}", heads, config, setup)
        sinks = None if self._sinks is None else self._sinks.tensor
        self.rule = LayerRule(multipliers.attention_scale, multipliers.attention_cap, sinks)
        self._place = layer - setup.shard.layers_of(config.num_layers).start
        self._rope = rope
        self._num_heads = len(heads)
        self._num_rotated = len(heads) + len(kv_heads)
        self._num_unrotated = len(kv_heads)
        num_gates = len(heads) if has_gates(config) else 0
        self._fused_shape = (self._num_rotated + len(kv_heads) + num_gates, size)
        self._qkv = Linear.column_parallel(
            f"{name}.qkv",
            qkv_matrices(tensors, config, heads, kv_heads),
            num_in or config.hidden_size,
            config.qkv_bias,
            setup,
            is_transposed=config.names.is_transposed,
            row_order=_row_order(config, self._num_rotated, len(kv_heads) + num_gates),
        )
        self._rotation = make_head_rotation(f"{name}.qk_norm", tensors, config, len(heads), len(kv_heads), setup)
        self._o = Linear.row_parallel(
            f"{name}.o",
            f"{tensors}.{config.names.output}",
            config.hidden_size,
            config.num_heads * size,
            scaled(heads, size),
            config.o_bias,
            setup,
            is_transposed=config.names.is_transposed,
        )

    def __call__(self, x: Tensor, rotations: Rotations, attention: Attention) -> Tensor:
        """The attention's summand for the residual stream, [T, E] of x [T, E]."""
        return self.project(self.attend(x, rotations, attention))

    def attend(self, x: Tensor, rotations: Rotations, attention: Attention) -> Tensor:
        """What each query head finds, [T, Hq, D] of x [T, E]."""
        num_tokens = x.shape[0]
        fused = self._qkv(x).view(num_tokens, *self._fused_shape)
        # q and k are neighbours in the fused output: norm and rotation take both in one call.
        qk = self._rotation(fused[:, : self._num_rotated], rotations[self._rope])
        unrotated = fused[:, self._num_rotated :]
        q, k, v = qk[:, : self._num_heads], qk[:, self._num_heads :], unrotated[:, : self._num_unrotated]
        attended = attention.run(self._place, q, k, v)
        if unrotated.shape[1] > self._num_unrotated:
            attended = attended * unrotated[:, self._num_unrotated :].sigmoid()
        return attended

    def project(self, attended: Tensor) -> Tensor:
        """The attention's summand for the residual stream, [T, E], of what the heads have found."""
        return self._o(attended.flatten(1))

    def parameters(self) -> Iterator[Parameter]:
        """The parameters of the products and the norms, and the sinks if the model has some."""
        yield from self._qkv.parameters()
        yield from self._rotation.parameters()
        yield from self._o.parameters()
        if self._sinks is not None:
            yield self._sinks

    def pack(self) -> None:
        """Pack the products, and prepare the norms."""
        self._qkv.pack()
        self._rotation.pack()
        self._o.pack()


def has_gates(config: ModelConfig) -> bool:
    """Whether each query head has a gate for what it attends to."""
    return isinstance(config.states, DeltaSettings)


def qkv_matrices(tensors: str, config: ModelConfig, heads: range, kv_heads: range) -> list[Matrix]:
    """The published matrices of these heads' queries, keys and values, and of their gates, in this order."""
    size, names = config.head_dim, config.names
    counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    chosen = (heads, kv_heads, kv_heads)
    if has_gates(config):
        return _gated_matrices(tensors, config, heads, kv_heads)
    if not names.qkv:
        parts = zip(("q_proj", "k_proj", "v_proj"), counts, chosen, strict=True)
        return [Matrix(f"{tensors}.{part}", count * size, scaled(of, size)) for part, count, of in parts]
    fused, num_rows = f"{tensors}.{names.qkv}", sum(counts) * size
    if names.qkv_order == "by_head":
        # each head has its query, key and value after each other
        first_rows = [(3 * head + which) * size for which, of in enumerate(chosen) for head in of]
        return [Matrix(fused, num_rows, range(first, first + size)) for first in first_rows]
    begins = (0, counts[0] * size, (counts[0] + counts[1]) * size)
    shares = [(begin, scaled(of, size)) for begin, of in zip(begins, chosen, strict=True)]
    return [Matrix(fused, num_rows, range(begin + rows.start, begin + rows.stop)) for begin, rows in shares]


def _gated_matrices(tensors: str, config: ModelConfig, heads: range, kv_heads: range) -> list[Matrix]:
    """A head's gate is published below its query."""
    size, num_rows = config.head_dim, config.num_kv_heads * config.head_dim
    queries, gates = (
        [
            Matrix(f"{tensors}.q_proj", 2 * config.num_heads * size, range(place * size, (place + 1) * size))
            for place in (2 * head + which for head in heads)
        ]
        for which in (0, 1)
    )
    keys_values = [Matrix(f"{tensors}.{part}", num_rows, scaled(kv_heads, size)) for part in ("k_proj", "v_proj")]
    return [*queries, *keys_values, *gates]


def _sinks(name: str, tensor: str, heads: range, config: ModelConfig, setup: PartSetup) -> Parameter:
    source = Source(tensor, (config.num_heads,), (heads,), (range(len(heads)),))
    return Parameter(name, setup.empty(len(heads)), (source,))


def _row_order(config: ModelConfig, num_rotated: int, num_values: int) -> Tensor | None:
    """The order of the fused rows after loading: within the heads of queries and keys as `head_order` says."""
    order, size = head_order(config), config.head_dim
    if order is None:
        return None
    rotated = torch.arange(num_rotated)[:, None] * size + order
    values = torch.arange(num_rotated * size, (num_rotated + num_values) * size)
    return torch.cat((rotated.flatten(), values))
