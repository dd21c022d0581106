"""A model that transformers' modelling code computes, behind the interface of Baton's own decoder.

Owns the way of a step through it: all sequences flattened into one row of tokens, as everywhere in Baton. Each token
has its position, nothing but attention connects tokens, and attention is Baton's, which knows the sequences. That this
is so for a model is made sure twice: by what its layers ask for (`find_layers`), and by its numbers
(`require_same_tokens`).

Slower than Baton's decoder: Python runs each operation, and weights are not packed.

Letters: T tokens of the step, N rows that need logits, V vocabulary, E hidden size, Hq, D, Dv as in `layers`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from baton.engine.attention.base import Attention, LayerRule
from baton.engine.models.facts import ModelFacts
from baton.engine.models.modelling.layers import find_layers, set_answers
from baton.wire.layout import LayerKv


class ModellingDecoder:
    """A model of transformers with the methods of `Decoder` that a runner needs. `model` is loaded, in its dtype, on
    its device."""

    is_recordable = False
    has_head = True

    def __init__(self, config: ModelFacts, model: PreTrainedModel) -> None:
        """Raises `ModelLoadError` for a model that cannot be computed this way."""
        layers = find_layers(model)
        self.config = config
        self.dtype = model.dtype
        self.device = model.device
        self.num_heads = layers[0].num_heads
        self.layer_kvs: tuple[LayerKv, ...] = tuple(layer.kv for layer in layers)
        self.layer_rules: tuple[LayerRule, ...] = tuple(layer.rule for layer in layers)
        self._step = _Step()
        for number, layer in enumerate(layers):
            set_answers(layer.module, _Layer(number, self._step))
        self._base: nn.Module = model.base_model
        self._given = _Given()
        self._head = _without_layers(model, self._given)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Run the model over the step's tokens, [T] int64. Returns rows [T, E] that are normed already."""
        self._step.attention = attention
        found = self._base(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        self._step.attention = None
        hidden: Tensor = found.last_hidden_state[0]
        return hidden

    def trial_inputs(self, num_tokens: int) -> Tensor:
        """Zeros [num_tokens] int64: token ids to try the model with."""
        return torch.zeros(num_tokens, dtype=torch.int64, device=self.device)

    def normed(self, hidden: Tensor) -> Tensor:
        """The last hidden states [N, E] of rows [N, E] that `forward` returned."""
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V], float32, of rows [N, E] that `forward` returned."""
        self._given.hidden = hidden[None]
        found = self._head(input_ids=torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device))
        self._given.hidden = None
        logits: Tensor = found.logits[0]
        return logits.to(torch.float32)


class _Step:
    """The attention of the step that is being computed."""

    attention: Attention | None = None


class _Layer:
    """Answers the attention calls of layer `number` by Baton's attention."""

    def __init__(self, number: int, step: _Step) -> None:
        self._number = number
        self._step = step

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, told: dict[str, Any]
    ) -> Tensor:
        """Attend with the backend of the running step; values that are narrower than keys are padded and cut again."""
        assert self._step.attention is not None  # only `forward` computes layers
        size, value_size = k.shape[3], v.shape[3]
        if value_size < size:
            v = functional.pad(v, (0, size - value_size))
        flat = (tensor[0].transpose(0, 1).contiguous() for tensor in (q, k, v))
        return self._step.attention.run(self._number, *flat)[None, ..., :value_size]


class _Hidden:
    """What the layers of a model return, for code that asks in whatever way for hidden states, and for nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """Stands for the layers of a model and returns the rows it was given: what is left of the model is its head, with
    all that the architecture does to logits."""

    hidden: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        # some heads reach through the layers' model to a decoder in it; a child of itself torch shall not see
        object.__setattr__(self, "decoder", self)

    def forward(self, *_: Any, **__: Any) -> _Hidden:
        """The given rows [1, N, E]."""
        assert self.hidden is not None  # only `logits` computes heads
        return _Hidden(self.hidden)


def _without_layers(model: PreTrainedModel, given: _Given) -> PreTrainedModel:
    """The same model, and the same head, with `given` in the place of its layers."""
    head = copy.copy(model)
    # a shallow copy shares its table of modules
    object.__setattr__(head, "_modules", {**model._modules, model.base_model_prefix: given})
    return head
