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
        """What is known of the model."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype it computes in."""
        ...

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        ...

    @property
    def num_heads(self) -> int:
        """Query heads of a layer."""
        ...

    @property
    def layer_kvs(self) -> tuple[LayerKv, ...]:
        """The KV that each layer stores for a token; a KV pool for this model must have room for it."""
        ...

    @property
    def layer_rules(self) -> tuple[LayerRule, ...]:
        """How each layer attends."""
        ...

    @property
    def is_recordable(self) -> bool:
        """Whether every layer is made of operations alone, one after another: what they compute with may then be noted
        once and computed again for any number of tokens."""
        ...

    @property
    def has_head(self) -> bool:
        """Whether it computes logits; without, what `forward` returns is the next stage's input."""
        ...

    def trial_inputs(self, num_tokens: int) -> Tensor:
        """What `forward` takes as its first argument, to try it out: token ids, or in a later stage a residual
        stream."""
        ...

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Run all layers over the step's tokens.

        token_ids and positions: [T] int64 on this device, sequences one after another, prompts and decodes mixed as
        `attention` has planned. Returns rows [T, E] for `logits`.
        """
        ...

    def normed(self, hidden: Tensor) -> Tensor:
        """The last hidden states [N, E] of the model, of rows [N, E] that `forward` returned. Only with `has_head`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V] float32 of rows [N, E] that `forward` returned."""
        ...
