"""EAGLE-3: a layer that attends with an embedding and a hidden state side by side.

Owns the order of operations, which is that of the published checkpoints: the hidden state is one matrix' product with
three of the model's residual streams, and in a chain the head's own stream. See `DraftHead`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from baton.engine.attention.base import Attention, LayerRule
from baton.engine.models.decoder import Decoder
from baton.engine.models.heads.config import Eagle3Config
from baton.engine.models.parameters import Parameter, Source, whole
from baton.engine.models.parts.attention import GroupedQueryAttention
from baton.engine.models.parts.base import Part, PartSetup
from baton.engine.models.parts.embedding import Embedding, make_head
from baton.engine.models.parts.linear import Linear, Matrix
from baton.engine.models.parts.mlp import GatedMlp
from baton.engine.models.parts.norm import make_norm
from baton.engine.models.rope import ModelRotations
from baton.wire.errors import ModelLoadError
from baton.wire.layout import LayerKv


class Eagle3Head:
    """The head that `config` describes, for `model`. See `DraftHead`."""

    def __init__(self, config: Eagle3Config, model: Decoder, setup: PartSetup) -> None:
        layer, names = config.layer, config.layer.names
        size, only = layer.hidden_size, names.layer(0)
        self.dtype = setup.dtype
        self.num_heads = layer.num_heads
        self.taps = config.taps
        self.architecture = "an EAGLE-3 head"
        self._adds_to_normed = config.adds_to_normed
        self._model = model
        self._rotations = ModelRotations(layer, setup.device)
        self._embedding = Embedding(layer, setup) if config.has_embedding else None
        rows = Matrix("fc", size, range(size))
        self._fc = Linear.column_parallel("fc", [rows], len(self.taps) * model.config.hidden_size, False, setup)
        self._embedding_norm = make_norm("input_norm", f"{only}.{names.input_norm}", layer, setup)
        self._hidden_norm = make_norm("hidden_norm", f"{only}.hidden_norm", layer, setup)
        self._attention = GroupedQueryAttention(0, layer, 0, setup, num_in=2 * size)
        self._mlp_norm = make_norm("mlp_norm", f"{only}.{names.mlp_norm}", layer, setup)
        self._mlp = GatedMlp("layers.0", f"{only}.{names.mlp}", layer.intermediate_size, layer, setup)
        self._norm = make_norm("norm", names.final_norm, layer, setup)
        self._head = make_head(None, replace(layer, vocab_size=config.num_rows), setup)
        self._tokens = ModelTokens(config.num_rows, layer.vocab_size, setup)

    @property
    def layer_kvs(self) -> tuple[LayerKv, ...]:
        """The KV of its one layer."""
        return (self._attention.kv,)

    @property
    def layer_rules(self) -> tuple[LayerRule, ...]:
        """The rule of its one layer."""
        return (self._attention.rule,)

    def fused(self, streams: Tensor) -> Tensor:
        """The product [T, E] with all streams."""
        return self._fc(streams)

    def forward(self, hidden: Tensor, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Store these slots; the residual stream [T, E] behind the layer."""
        embed = self._model.embed if self._embedding is None else self._embedding
        normed = self._hidden_norm(hidden, None)
        residual = (normed if self._adds_to_normed else hidden).clone()
        both = torch.cat((self._embedding_norm(embed(token_ids, positions), None), normed), dim=1)
        attended = self._attention(both, self._rotations.tables(positions, self.dtype), attention)
        return residual.add_(self._mlp(self._mlp_norm(residual, attended)))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of the tokens that the head knows."""
        return self._head(self._norm(hidden, None))

    def model_ids(self, rows: Tensor) -> Tensor:
        """The model's ids of these tokens."""
        return self._tokens(rows)

    def parts(self) -> Iterator[Part]:
        """All parts, in the order of computation."""
        if self._embedding is not None:
            yield self._embedding
        yield from (self._fc, self._embedding_norm, self._hidden_norm, self._attention, self._mlp_norm, self._mlp)
        yield from (self._norm, self._head, self._tokens)

    def parameters(self) -> Iterator[Parameter]:
        """All parameters. Only before `pack`."""
        for part in self.parts():
            yield from part.parameters()

    def leaves_out(self, name: str) -> bool:
        """Which tokens the head knows is said twice; and the ids of all of them need no table."""
        return name == "t2d" or (name == "d2t" and not self._tokens.has_table)


class ModelTokens:
    """The model's ids of a head's tokens. A file has how far each is from its own place. See `Part`."""

    def __init__(self, num_rows: int, vocab_size: int, setup: PartSetup) -> None:
        self.has_table = num_rows < vocab_size
        self._vocab_size = vocab_size
        self._ids = torch.zeros(num_rows if self.has_table else 0, dtype=torch.int64, device=setup.device)

    def __call__(self, rows: Tensor) -> Tensor:
        """The ids [N] of the tokens `rows` [N]."""
        return self._ids.index_select(0, rows) if self.has_table else rows

    def parameters(self) -> Iterator[Parameter]:
        """The distances, if there is a table."""
        if self.has_table:
            shape = tuple(self._ids.shape)
            yield Parameter("d2t", self._ids, (Source("d2t", shape, whole(shape), whole(shape)),))

    def pack(self) -> None:
        """Make ids of the distances. Raises `ModelLoadError` for one that the model has not."""
        if not self.has_table:
            return
        self._ids += torch.arange(len(self._ids), device=self._ids.device)
        if int(self._ids.min()) < 0 or int(self._ids.max()) >= self._vocab_size:
            raise ModelLoadError(f"d2t names tokens outside of the model's {self._vocab_size}")
