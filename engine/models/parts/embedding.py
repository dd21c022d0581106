"""The embedding, from token ids to the residual stream, and the head, from there to logits. Every rank has both whole.

Letters: T tokens of the step, N rows that need logits, V vocabulary, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.linear_weights import PlainWeight
from engine.models.parameters import Parameter, Source, whole
from engine.models.parts.base import PartSetup
from engine.models.parts.linear import Linear, Matrix

_HEAD = "lm_head"


class Embedding:
    """The row of each token. See `Part`. `table`: [V, E], which a tied head multiplies by."""

    def __init__(self, config: ModelConfig, setup: PartSetup) -> None:
        shape = (config.vocab_size, config.hidden_size)
        self.table = setup.empty(*shape)
        source = Source("model.embed_tokens.weight", shape, whole(shape), whole(shape))
        copies = (f"{_HEAD}.weight",) if config.tie_word_embeddings else ()
        self._parameter = Parameter("embedding", self.table, (source,), copies=copies)
        self._ops = setup.ops

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T, E] of token ids [T] int64."""
        return self._ops.embed(token_ids, self.table)

    def parameters(self) -> Iterator[Parameter]:
        """See `Part.parameters`."""
        yield self._parameter

    def pack(self) -> None:
        """See `Part.pack`: a lookup needs the plain rows."""


def make_head(embedding: Embedding, config: ModelConfig, setup: PartSetup) -> Linear:
    """The product that gives logits [N, V]. A head tied to the embedding has no parameters; packed, it is a copy of the
    table, since it is the largest product of a decode step."""
    if config.tie_word_embeddings:
        return Linear(PlainWeight(embedding.table), None, setup.ops)
    rows = Matrix(_HEAD, config.vocab_size, range(config.vocab_size))
    return Linear.column_parallel("head", [rows], config.hidden_size, False, setup)
