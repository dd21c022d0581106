"""The embedding, from token ids to the residual stream, and the head, from there to logits.

Owns how a vocabulary is divided among ranks: each has neighbouring rows of both. The rows of the step's tokens are
added up, where a rank has nothing but zeros for the rows of others; logits come together on the first rank.

Letters: T tokens of the step, N rows that need logits, V vocabulary, E hidden size, P positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from baton.engine.models.collectives import Collectives
from baton.engine.models.config import ModelConfig, Multipliers
from baton.engine.models.linear_weights import LinearWeight, PlainWeight
from baton.engine.models.parameters import Parameter, Source, whole
from baton.engine.models.parts.base import Part, PartSetup
from baton.engine.models.parts.linear import Linear, Matrix, unread_weight
from baton.engine.models.quantization.base import Piece, Unread
from baton.engine.models.shard import Shard


class Embedding:
    """The row of each token. See `Part`. `table`: this rank's `rows` of [V, E]. Loading fills a plain table, and a tied
    head multiplies by it."""

    def __init__(self, config: ModelConfig, setup: PartSetup) -> None:
        shape = (config.vocab_size, config.hidden_size)
        self.rows = _rows(config, setup)
        matrix = setup.empty(len(self.rows), config.hidden_size)
        self.table: LinearWeight = PlainWeight(matrix)
        taken = (self.rows, range(config.hidden_size))
        source = Source(f"{config.names.embedding}.weight", shape, taken, whole(tuple(matrix.shape)))
        copies = (f"{config.names.head}.weight",) if config.tie_word_embeddings else ()
        self._parameters = [Parameter("embedding", matrix, (source,), copies=copies)]
        divided = None if setup.collectives is None else DividedTable(self.rows, setup, setup.collectives)
        self._ops = divided or setup.ops
        self.is_divided = divided is not None

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """The rows [T, E] of the tokens. token_ids and positions: [T] int64. The caller may change the rows."""
        return self._ops.embed(token_ids, self.table)

    @property
    def lookup_table(self) -> LinearWeight | None:
        """The table, where its rows are all that there is to it."""
        return self.table if type(self) is Embedding and not self.is_divided else None

    def parameters(self) -> Iterator[Parameter]:
        """The rows of the table; nothing after `pack`."""
        yield from self._parameters

    def pack(self) -> None:
        """Drop the parameters. Nothing is packed: the plain rows stay, until a tied head has packed them."""
        self._parameters.clear()

    def share(self, table: LinearWeight) -> None:
        """Look rows up in what a tied head multiplies by, if that can be done, and keep no other."""
        if self._ops.has_rows(table):
            self.table = table


class DividedTable:
    """The operations of an embedding whose table each rank has some rows of. See `DecoderOps.embed`."""

    def __init__(self, rows: range, setup: PartSetup, collectives: Collectives) -> None:
        self._rows, self._ops, self._collectives = rows, setup.ops, collectives

    def embed(self, token_ids: Tensor, table: LinearWeight) -> Tensor:
        """Rows [T, E], summed over the ranks. `table` [rows, E] is this rank's share of the vocabulary."""
        places = token_ids - self._rows.start
        is_elsewhere = (places < 0) | (places >= len(self._rows))
        found = self._ops.embed(places.masked_fill_(is_elsewhere, 0), table)
        return self._collectives.add_up(found.masked_fill_(is_elsewhere[:, None], 0.0))

    def has_rows(self, weight: LinearWeight) -> bool:
        """Whether the operations of this rank can look up rows in such a table."""
        return self._ops.has_rows(weight)


class ScaledEmbedding(Embedding):
    """The row of each token times a constant, which is rounded to the model's dtype as transformers does."""

    def __init__(self, config: ModelConfig, setup: PartSetup) -> None:
        super().__init__(config, setup)
        self._factor = setup.empty().fill_(config.multipliers.embedding)

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Rows [T, E] of the tokens, times a factor."""
        return super().__call__(token_ids, positions).mul_(self._factor)


class PositionedEmbedding(Embedding):
    """The row of each token, plus the row of its position."""

    def __init__(self, config: ModelConfig, setup: PartSetup) -> None:
        super().__init__(config, setup)
        shape = (config.max_position_embeddings, config.hidden_size)
        self._positions = setup.empty(*shape)
        source = Source(f"{config.names.positions}.weight", shape, whole(shape), whole(shape))
        self._parameters.append(Parameter("positions", self._positions, (source,)))

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Rows [T, E] of the tokens, plus those of their positions."""
        return super().__call__(token_ids, positions).add_(F.embedding(positions, self._positions))


def make_embedding(config: ModelConfig, setup: PartSetup) -> Embedding:
    """The embedding of the model's kind."""
    if config.names.positions:
        return PositionedEmbedding(config, setup)
    return Embedding(config, setup) if config.multipliers.embedding == 1.0 else ScaledEmbedding(config, setup)


class Head(Part, Protocol):
    """The product that gives logits."""

    def __call__(self, x: Tensor) -> Tensor:
        """Logits [N, V] of x [N, E], on the first rank. The result on other ranks is of no use."""
        ...


class DividedHead(Linear):
    """A product of whose outputs each rank computes some: those of its rows of the vocabulary. See `Head`."""

    def __init__(
        self, unread: Sequence[Unread], config: ModelConfig, setup: PartSetup, collectives: Collectives
    ) -> None:
        super().__init__(unread, None, setup)
        self._collectives = collectives
        self._vocab_size = config.vocab_size
        self._width = len(Shard(0, setup.shard.size).part_of(config.vocab_size))

    def __call__(self, x: Tensor) -> Tensor:
        """Logits [N, V] on the first rank, put together from every rank's share."""
        share = super().__call__(x)
        # the last parts may be shorter, and what is put side by side has one width
        padded = F.pad(share, (0, self._width - share.shape[1]))
        return self._collectives.side_by_side(padded)[:, : self._vocab_size].contiguous()


class TiedHead:
    """A head that multiplies by the table of `embedding`. Packed, they are one table, where rows can be looked up in
    it. See `Head`."""

    def __init__(self, head: Linear, embedding: Embedding) -> None:
        self._head = head
        self._embedding = embedding

    def __call__(self, x: Tensor) -> Tensor:
        """Logits [N, V], by the product with the embedding's table."""
        return self._head(x)

    def parameters(self) -> Iterator[Parameter]:
        """The parameters of the product, which is the embedding's table."""
        yield from self._head.parameters()

    def pack(self) -> None:
        """Pack the product; the embedding looks rows up in the packed table from then on."""
        self._head.pack()
        self._embedding.share(self._head.weight)


class ScaledHead:
    """Logits times a constant, or capped. See `Head`."""

    def __init__(self, head: Head, multipliers: Multipliers) -> None:
        self._head = head
        self._factor, self._cap = multipliers.logits, multipliers.logits_cap

    def __call__(self, x: Tensor) -> Tensor:
        """Logits [N, V] of the inner head, times a factor, and capped by tanh where the model caps them."""
        logits = self._head(x)
        if self._factor != 1.0:
            logits = logits * self._factor
        return logits if self._cap is None else (logits / self._cap).tanh_() * self._cap

    def parameters(self) -> Iterator[Parameter]:
        """The parameters of the inner head."""
        yield from self._head.parameters()

    def pack(self) -> None:
        """Pack the inner head."""
        self._head.pack()


def _tied(embedding: Embedding, config: ModelConfig, setup: PartSetup) -> Unread:
    shape = (config.vocab_size, config.hidden_size)
    columns = range(config.hidden_size)
    piece = Piece("head", config.names.embedding, shape, embedding.rows, columns, setup.dtype, setup.device)
    assert isinstance(embedding.table, PlainWeight)  # nothing is packed yet
    return setup.quantization.unread(piece) or embedding.table.loaded()


def make_head(embedding: Embedding | None, config: ModelConfig, setup: PartSetup) -> Head:
    """The product that gives logits [N, V]. A head tied to the embedding has no parameters. None: the embedding is
    another stage's, and a tied head loads the table as its own."""
    tied = embedding if config.tie_word_embeddings else None
    if tied is not None:
        unread: Sequence[Unread] = [_tied(tied, config, setup)]
    else:
        name = config.names.embedding if config.tie_word_embeddings else config.names.head
        rows = Matrix(name, config.vocab_size, _rows(config, setup))
        unread = unread_weight("head", [rows], config.hidden_size, range(config.hidden_size), setup)
    product = Linear(unread, None, setup)
    if setup.collectives is not None:
        product = DividedHead(unread, config, setup, setup.collectives)
    head: Head = product if tied is None else TiedHead(product, tied)
    is_plain = config.multipliers.logits == 1.0 and config.multipliers.logits_cap is None
    return head if is_plain else ScaledHead(head, config.multipliers)


def _rows(config: ModelConfig, setup: PartSetup) -> range:
    """This rank's rows of the vocabulary; all of them where nothing would put the parts together."""
    return range(config.vocab_size) if setup.collectives is None else setup.shard.part_of(config.vocab_size)
