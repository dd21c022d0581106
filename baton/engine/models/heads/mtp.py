"""The layer for further tokens that a model ships (MTP): one layer like the model's own, over an embedding and a hidden
state that one matrix brings together.

Owns the order of operations. The hidden states are the model's last ones, and in a chain the head's own, normed alike.
Embedding and output layer are the model's, whatever copies the file has of them. See `DraftHead`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from baton.engine.attention.base import Attention, LayerRule
from baton.engine.models.decoder import Decoder
from baton.engine.models.heads.config import MtpConfig
from baton.engine.models.parameters import Parameter
from baton.engine.models.parts.base import Part, PartSetup
from baton.engine.models.parts.layers import make_layer
from baton.engine.models.parts.linear import Linear, Matrix
from baton.engine.models.parts.norm import make_norm
from baton.engine.models.rope import ModelRotations
from baton.wire.layout import LayerKv


class MtpHead:
    """The head that `config` describes, of `model`. See `DraftHead`."""

    taps: tuple[int, ...] = ()

    def __init__(self, config: MtpConfig, model: Decoder, setup: PartSetup) -> None:
        layer, size = config.layer, config.layer.hidden_size
        self.dtype = setup.dtype
        self.num_heads = layer.num_heads
        self.architecture = f"the layer for further tokens of {layer.architecture}"
        self._config = config
        self._model = model
        self._rotations = ModelRotations(layer, setup.device)
        self._embedding_norm = make_norm("embedding_norm", config.embedding_norm, layer, setup)
        self._hidden_norm = make_norm("hidden_norm", config.hidden_norm, layer, setup)
        rows = Matrix(config.projection, size, range(size))
        self._projection = Linear.column_parallel("projection", [rows], 2 * size, False, setup)
        self._layer = make_layer(0, layer, 0, setup)
        self._norm = make_norm("norm", layer.names.final_norm, layer, setup)

    @property
    def layer_kvs(self) -> tuple[LayerKv, ...]:
        """The KV of its one layer."""
        return (self._layer.kv,)

    @property
    def layer_rules(self) -> tuple[LayerRule, ...]:
        """The rule of its one layer."""
        return (self._layer.rule,)

    def fused(self, streams: Tensor) -> Tensor:
        """The model's last hidden states [T, E], of the one stream."""
        return self._model.normed(streams)

    def forward(self, hidden: Tensor, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Store these slots; the normed hidden states [T, E] behind the layer."""
        embedded = self._embedding_norm(self._model.embed(token_ids, positions), None)
        residual = self._projection(torch.cat((embedded, self._hidden_norm(hidden, None)), dim=1))
        delta = self._layer.forward(residual, None, self._rotations.tables(positions, self.dtype), attention)
        return self._norm(residual, delta)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] by the model's output layer."""
        return self._model.project(hidden)

    def model_ids(self, rows: Tensor) -> Tensor:
        """`rows`: it knows all tokens."""
        return rows

    def parts(self) -> Iterator[Part]:
        """All parts, in the order of computation."""
        yield from (self._embedding_norm, self._hidden_norm, self._projection)
        yield from self._layer.parts()
        yield self._norm

    def parameters(self) -> Iterator[Parameter]:
        """All parameters. Only before `pack`."""
        for part in self.parts():
            yield from part.parameters()

    def leaves_out(self, name: str) -> bool:
        """The model's own tensors, and copies of them."""
        begin = self._config.begin
        return not name.startswith(begin) or name.removeprefix(begin) in self._config.copies
