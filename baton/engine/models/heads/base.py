"""A loaded head as whoever drafts with it sees it.

Owns the contract. What is stored in the slot of a token is made of the model's hidden state there and of the token that
comes next; what the head says of that slot is a guess at the token after the next.

Letters: T tokens, N rows, E hidden size of the head, S that of the model, K streams that are read, V tokens it knows.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from baton.engine.attention.base import Attention, LayerRule
from baton.engine.models.loading import Loadable
from baton.wire.layout import LayerKv


class DraftHead(Loadable, Protocol):
    """One layer over hidden states. The caller runs everything under `torch.inference_mode()`."""

    @property
    def num_heads(self) -> int:
        """The number of query heads of its layer."""
        ...

    @property
    def layer_kvs(self) -> tuple[LayerKv, ...]:
        """The KV that its layer stores for a token."""
        ...

    @property
    def layer_rules(self) -> tuple[LayerRule, ...]:
        """How its layer attends."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """In front of which layers of the model the residual stream is read; none: behind all of them."""
        ...

    def fused(self, streams: Tensor) -> Tensor:
        """What `forward` takes as hidden states, [T, E], of K streams of the model side by side [T, K S]."""
        ...

    def forward(self, hidden: Tensor, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Store the slots at `positions`, each of a hidden state and the token behind it. Returns the head's own hidden
        states [T, E], which `logits` takes, and `forward` for the next slot. token_ids, positions: [T] int64."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of rows [N, E] that `forward` returned."""
        ...

    def model_ids(self, rows: Tensor) -> Tensor:
        """The model's token ids for the places [N] among the V tokens of `logits`."""
        ...
