"""The kinds of decoder layers: attention and MLP, and where the norms between them are.

Owns the order of operations within a layer, which follows transformers. A layer hands on what its MLP adds to the
residual stream without adding it: the next layer's norm does both in one operation.

Letters: T tokens of the step, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from baton.engine.attention.base import Attention, LayerRule
from baton.engine.models.config import ModelConfig
from baton.engine.models.family import Block
from baton.engine.models.parts.attention import GroupedQueryAttention
from baton.engine.models.parts.base import Part, PartSetup
from baton.engine.models.parts.delta_net import GatedDeltaNet
from baton.engine.models.parts.latent_attention import LatentAttention
from baton.engine.models.parts.mlp import GatedMlp, PlainMlp
from baton.engine.models.parts.norm import StreamNorm, make_norm
from baton.engine.models.parts.short_convolution import ShortConvolution
from baton.engine.models.parts.sparse_mlp import SparseMlp
from baton.engine.models.rope import Rotations
from baton.engine.models.state_settings import DeltaSettings
from baton.wire.layout import LayerKv


class MlpPart(Part, Protocol):
    """The MLP of a layer, of any kind."""

    def __call__(self, x: Tensor) -> Tensor:
        """The MLP's summand for the residual stream, [T, E] of x [T, E]."""
        ...


class DecoderLayer(Protocol):
    """One layer of a decoder."""

    @property
    def kv(self) -> LayerKv:
        """The KV that the layer stores for each token."""
        ...

    @property
    def rule(self) -> LayerRule:
        """How the layer attends."""
        ...

    def forward(self, residual: Tensor, delta: Tensor | None, rotations: Rotations, attention: Attention) -> Tensor:
        """Add `delta` [T, E], which the layer before returned, and this layer's attention to `residual` [T, E] in
        place. Returns what is still to be added [T, E]."""
        ...

    def parts(self) -> tuple[Part, ...]:
        """The parts of the layer, in the order in which they compute."""
        ...


def make_layer(layer: int, config: ModelConfig, rope: int, setup: PartSetup) -> DecoderLayer:
    """The layer of that number. `rope`: the number of its rotation."""
    return _KINDS[config.block](layer, config, rope, setup)


class _Parts:
    """Makes the parts of one layer by their names in the checkpoint."""

    def __init__(self, layer: int, config: ModelConfig, rope: int, setup: PartSetup) -> None:
        self._layer, self._config, self._rope, self._setup = layer, config, rope, setup
        self._name, self._tensors = f"layers.{layer}", config.names.layer(layer)

    def norm(self, name: str, tensor: str) -> StreamNorm:
        return make_norm(f"{self._name}.{name}", f"{self._tensors}.{tensor}", self._config, self._setup)

    def attention(self) -> GroupedQueryAttention | LatentAttention | ShortConvolution | GatedDeltaNet:
        states = self._config.states
        if states is not None and states.layers[self._layer]:
            if isinstance(states, DeltaSettings):
                return GatedDeltaNet(self._layer, self._config, states, self._setup)
            return ShortConvolution(self._layer, self._config, states, self._setup)
        if self._config.latent is not None:
            return LatentAttention(self._layer, self._config, self._config.latent, self._rope, self._setup)
        return GroupedQueryAttention(self._layer, self._config, self._rope, self._setup)

    def mlp(self) -> MlpPart:
        config, tensors = self._config, f"{self._tensors}.{self._config.names.mlp}"
        if config.experts is not None and config.experts.sparse_layers[self._layer]:
            return SparseMlp(self._name, tensors, config.experts, config, self._setup)
        kind = GatedMlp if config.mlp == "gated" else PlainMlp
        return kind(self._name, tensors, config.intermediate_size, config, self._setup)


class PreNormLayer:
    """A layer with norms before attention and before the MLP. See `DecoderLayer`."""

    def __init__(self, layer: int, config: ModelConfig, rope: int, setup: PartSetup) -> None:
        make, names = _Parts(layer, config, rope, setup), config.names
        self._input_norm = make.norm("input_norm", names.input_norm)
        self._attention = make.attention()
        self._mlp_norm = make.norm("mlp_norm", names.mlp_norm)
        self._mlp = make.mlp()

    @property
    def kv(self) -> LayerKv:
        """Size and layout of the KV that the layer's attention stores."""
        return self._attention.kv

    @property
    def rule(self) -> LayerRule:
        """How the layer's attention attends."""
        return self._attention.rule

    def forward(self, residual: Tensor, delta: Tensor | None, rotations: Rotations, attention: Attention) -> Tensor:
        """Norm, attention, norm, MLP. Returns what the MLP adds, [T, E]; `residual` [T, E] has everything else."""
        attended = self._attention(self._input_norm(residual, delta), rotations, attention)
        return self._mlp(self._mlp_norm(residual, attended))

    def attend(self, residual: Tensor, delta: Tensor | None, rotations: Rotations, attention: Attention) -> Tensor:
        """The first half of a plain layer: what its heads find [T, Hq, D]. `delta` is added to `residual`."""
        assert isinstance(self._attention, GroupedQueryAttention)
        return self._attention.attend(self._input_norm(residual, delta), rotations, attention)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The second half, of which each row depends on its own alone. See `forward`."""
        assert isinstance(self._attention, GroupedQueryAttention)
        return self._mlp(self._mlp_norm(residual, self._attention.project(attended)))

    def parts(self) -> tuple[Part, ...]:
        """Both norms, attention and MLP, in the order of computation."""
        return self._input_norm, self._attention, self._mlp_norm, self._mlp


class ScaledLayer(PreNormLayer):
    """A `PreNormLayer` whose summands for the stream are multiplied by a constant."""

    def __init__(self, layer: int, config: ModelConfig, rope: int, setup: PartSetup) -> None:
        super().__init__(layer, config, rope, setup)
        self._factor = config.multipliers.residual

    def forward(self, residual: Tensor, delta: Tensor | None, rotations: Rotations, attention: Attention) -> Tensor:
        """Norm, attention, norm, MLP, with each summand times a factor. Returns what the MLP adds, [T, E]."""
        attended = self._attention(self._input_norm(residual, delta), rotations, attention)
        return self._mlp(self._mlp_norm(residual, attended * self._factor)) * self._factor


class PostNormLayer:
    """A layer with norms after attention and after the MLP alone. See `DecoderLayer`."""

    def __init__(self, layer: int, config: ModelConfig, rope: int, setup: PartSetup) -> None:
        make, names = _Parts(layer, config, rope, setup), config.names
        self._attention = make.attention()
        self._attention_norm = make.norm("attention_out_norm", names.attention_out_norm)
        self._mlp = make.mlp()
        self._mlp_norm = make.norm("mlp_out_norm", names.mlp_out_norm)

    @property
    def kv(self) -> LayerKv:
        """Size and layout of the KV that the layer's attention stores."""
        return self._attention.kv

    @property
    def rule(self) -> LayerRule:
        """How the layer's attention attends."""
        return self._attention.rule

    def forward(self, residual: Tensor, delta: Tensor | None, rotations: Rotations, attention: Attention) -> Tensor:
        """Attention, norm, MLP, norm: norms are of what is added. Returns the normed MLP's [T, E]."""
        if delta is not None:
            residual.add_(delta)
        residual.add_(self._attention_norm(self._attention(residual, rotations, attention), None))
        return self._mlp_norm(self._mlp(residual), None)

    def parts(self) -> tuple[Part, ...]:
        """Attention and MLP, each with the norm behind it."""
        return self._attention, self._attention_norm, self._mlp, self._mlp_norm


class SandwichLayer(PreNormLayer):
    """A layer with norms before and after attention and MLP. See `DecoderLayer`."""

    def __init__(self, layer: int, config: ModelConfig, rope: int, setup: PartSetup) -> None:
        super().__init__(layer, config, rope, setup)
        make, names = _Parts(layer, config, rope, setup), config.names
        self._attention_out = make.norm("attention_out_norm", names.attention_out_norm)
        self._mlp_out = make.norm("mlp_out_norm", names.mlp_out_norm)

    def forward(self, residual: Tensor, delta: Tensor | None, rotations: Rotations, attention: Attention) -> Tensor:
        """Norms in front of and behind both attention and MLP. Returns the normed MLP's [T, E]."""
        attended = self._attention(self._input_norm(residual, delta), rotations, attention)
        attended = self._attention_out(attended, None)
        return self._mlp_out(self._mlp(self._mlp_norm(residual, attended)), None)

    def parts(self) -> tuple[Part, ...]:
        """The parts of a layer with norms in front, then the two norms behind."""
        return *super().parts(), self._attention_out, self._mlp_out


class ParallelLayer:
    """Attention and MLP read the same normed stream. See `DecoderLayer`."""

    def __init__(self, layer: int, config: ModelConfig, rope: int, setup: PartSetup) -> None:
        make, names = _Parts(layer, config, rope, setup), config.names
        self._norm = make.norm("input_norm", names.input_norm)
        self._attention = make.attention()
        self._mlp = make.mlp()

    @property
    def kv(self) -> LayerKv:
        """Size and layout of the KV that the layer's attention stores."""
        return self._attention.kv

    @property
    def rule(self) -> LayerRule:
        """How the layer's attention attends."""
        return self._attention.rule

    def forward(self, residual: Tensor, delta: Tensor | None, rotations: Rotations, attention: Attention) -> Tensor:
        """Attention and MLP of the same normed rows. Returns what the MLP adds, [T, E]."""
        normed = self._norm(residual, delta)
        residual.add_(self._attention(normed, rotations, attention))
        return self._mlp(normed)

    def parts(self) -> tuple[Part, ...]:
        """The norm, attention and MLP."""
        return self._norm, self._attention, self._mlp


class TwoNormParallelLayer(PreNormLayer):
    """Attention and MLP read the same stream, each by a norm of its own."""

    def forward(self, residual: Tensor, delta: Tensor | None, rotations: Rotations, attention: Attention) -> Tensor:
        """Attention and MLP beside each other, each with its own norm. Returns the sum of both, [T, E]."""
        normed = self._input_norm(residual, delta)
        added = self._mlp(self._mlp_norm(residual, None))
        return added.add_(self._attention(normed, rotations, attention))


def _pre(layer: int, config: ModelConfig, rope: int, setup: PartSetup) -> DecoderLayer:
    kind = PreNormLayer if config.multipliers.residual == 1.0 else ScaledLayer
    return kind(layer, config, rope, setup)


_KINDS: Mapping[Block, Callable[[int, ModelConfig, int, PartSetup], DecoderLayer]] = {
    "pre": _pre,
    "post": PostNormLayer,
    "sandwich": SandwichLayer,
    "parallel": ParallelLayer,
    "parallel_two_norms": TwoNormParallelLayer,
}
