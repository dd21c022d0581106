"""A loaded model as a runner sees it: what computes a step's tokens and their logits.

Owns nothing but the contract. There are two: Baton's own decoder (`baton.engine.models.decoder`), and any other
architecture in transformers' modelling code (`baton.engine.models.modelling`).

Letters: T tokens of the step, N rows that need logits, V vocabulary, E hidden size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from baton.engine.attention.base import Attention, LayerRule
from baton.engine.models.facts import ModelFacts
from baton.wire.layout import LayerKv


class RunnableDecoder(Protocol):
    """One model on one device. The caller runs forward and logits under `torch.inference_mode()`."""

    @property
    def config(self) -> ModelFacts:
        """The model's facts."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the decoder computes."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        ...

    @property
    def num_heads(self) -> int:
        """The number of query heads of a layer."""
        ...

    @property
    def layer_kvs(self) -> tuple[LayerKv, ...]:
        """The KV that each layer stores for a token; a KV pool for this model must have room for it."""
        ...

    @property
    def layer_rules(self) -> tuple[LayerRule, ...]:
        """For each layer of this stage, how it attends."""
        ...

    @property
    def is_recordable(self) -> bool:
        """Whether every layer is made of operations alone, one after another. Their arguments may then be noted once,
        and computed with again for any number of tokens."""
        ...

    @property
    def has_head(self) -> bool:
        """Whether the decoder computes logits. Without a head, the result of `forward` is the next stage's input."""
        ...

    def trial_inputs(self, num_tokens: int) -> Tensor:
        """A first argument for `forward`, to try it out: token ids, or in a later stage a residual stream."""
        ...

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Run all layers over the step's tokens. Returns rows [T, E] for `logits`.

        token_ids and positions: [T] int64 on this device. Sequences lie one after another, prompts and decodes mixed as
        `attention` has planned.
        """
        ...

    def normed(self, hidden: Tensor) -> Tensor:
        """The last hidden states [N, E] of the model, of rows [N, E] that `forward` returned. Only with `has_head`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V], float32, of rows [N, E] that `forward` returned."""
        ...
