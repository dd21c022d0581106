"""The embedding, from token ids to the residual stream, and the head, from there to logits. Every rank has both whole.

Letters: T tokens of the step, N rows that need logits, V vocabulary, E hidden size, P positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from engine.models.config import ModelConfig, Multipliers
from engine.models.linear_weights import PlainWeight
from engine.models.parameters import Parameter, Source, whole
from engine.models.parts.base import Part, PartSetup
from engine.models.parts.linear import Linear, Matrix
from engine.models.quantization.base import Piece


class Embedding:
    """The row of each token. See `Part`. `table`: [V, E], which a tied head multiplies by."""

    def __init__(self, config: ModelConfig, setup: PartSetup) -> None:
        shape = (config.vocab_size, config.hidden_size)
        self.table = setup.empty(*shape)
        source = Source(f"{config.names.embedding}.weight", shape, whole(shape), whole(shape))
        copies = (f"{config.names.head}.weight",) if config.tie_word_embeddings else ()
        self._parameter = Parameter("embedding", self.table, (source,), copies=copies)
        self._ops = setup.ops

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """[T, E] of token ids and positions, each [T] int64. The caller may change it."""
        return self._ops.embed(token_ids, self.table)

    @property
    def lookup_table(self) -> Tensor | None:
        """The table, where its rows are all that there is to it."""
        return self.table if type(self) is Embedding else None

    def parameters(self) -> Iterator[Parameter]:
        """See `Part.parameters`."""
        yield self._parameter

    def pack(self) -> None:
        """See `Part.pack`: a lookup needs the plain rows."""


class ScaledEmbedding(Embedding):
    """The row of each token times a constant, which is rounded to the model's dtype as transformers does."""

    def __init__(self, config: ModelConfig, setup: PartSetup) -> None:
        super().__init__(config, setup)
        self._factor = self.table.new_full((), config.multipliers.embedding)

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """See `Embedding`."""
        return super().__call__(token_ids, positions).mul_(self._factor)


class PositionedEmbedding(Embedding):
    """The row of each token, plus the row of its position."""

    def __init__(self, config: ModelConfig, setup: PartSetup) -> None:
        super().__init__(config, setup)
        shape = (config.max_position_embeddings, config.hidden_size)
        self._positions = setup.empty(*shape)
        source = Source(f"{config.names.positions}.weight", shape, whole(shape), whole(shape))
        self._position_parameter = Parameter("positions", self._positions, (source,))

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """See `Embedding`."""
        return super().__call__(token_ids, positions).add_(F.embedding(positions, self._positions))

    def parameters(self) -> Iterator[Parameter]:
        """See `Part.parameters`."""
        yield from super().parameters()
        yield self._position_parameter


def make_embedding(config: ModelConfig, setup: PartSetup) -> Embedding:
    """The embedding of the model's kind."""
    if config.names.positions:
        return PositionedEmbedding(config, setup)
    return Embedding(config, setup) if config.multipliers.embedding == 1.0 else ScaledEmbedding(config, setup)


class Head(Part, Protocol):
    """The product that gives logits."""

    def __call__(self, x: Tensor) -> Tensor:
        """[N, V] of x [N, E]."""
        ...


class ScaledHead:
    """Logits times a constant, or capped. See `Head`."""

    def __init__(self, head: Linear, multipliers: Multipliers) -> None:
        self._head = head
        self._factor, self._cap = multipliers.logits, multipliers.logits_cap

    def __call__(self, x: Tensor) -> Tensor:
        """See `Head`."""
        logits = self._head(x)
        if self._factor != 1.0:
            logits = logits * self._factor
        return logits if self._cap is None else (logits / self._cap).tanh_() * self._cap

    def parameters(self) -> Iterator[Parameter]:
        """See `Part.parameters`."""
        yield from self._head.parameters()

    def pack(self) -> None:
        """See `Part.pack`."""
        self._head.pack()


def _tied_head(embedding: Embedding, config: ModelConfig, setup: PartSetup) -> Linear:
    shape = (config.vocab_size, config.hidden_size)
    rows, columns = whole(shape)
    piece = Piece("head", config.names.embedding, shape, rows, columns, setup.dtype, setup.device)
    quantized = setup.quantization.unread(piece)
    return Linear([quantized or PlainWeight(embedding.table)], None, setup)


def make_head(embedding: Embedding, config: ModelConfig, setup: PartSetup) -> Head:
    """The product that gives logits [N, V]. A head tied to the embedding has no parameters; packed, it is a copy of the
    table, since it is the largest product of a decode step."""
    if config.tie_word_embeddings:
        head = _tied_head(embedding, config, setup)
    else:
        rows = Matrix(config.names.head, config.vocab_size, range(config.vocab_size))
        head = Linear.column_parallel("head", [rows], config.hidden_size, False, setup)
    is_plain = config.multipliers.logits == 1.0 and config.multipliers.logits_cap is None
    return head if is_plain else ScaledHead(head, config.multipliers)
