"""The gated MLP of a layer.

Letters: T tokens of the step, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.parameters import Parameter
from engine.models.parts.base import PartSetup
from engine.models.parts.linear import Linear, Matrix


class GatedMlp:
    """down(silu(gate(x)) * up(x)). See `Part`."""

    def __init__(self, layer: int, config: ModelConfig, setup: PartSetup) -> None:
        name, tensors, inner = f"layers.{layer}", f"model.layers.{layer}.mlp", config.intermediate_size
        share = setup.shard.share_of(inner, "rows of the MLP")
        matrices = [Matrix(f"{tensors}.gate_proj", inner, share), Matrix(f"{tensors}.up_proj", inner, share)]
        self._gate_up = Linear.column_parallel(f"{name}.gate_up", matrices, config.hidden_size, config.mlp_bias, setup)
        self._down = Linear.row_parallel(
            f"{name}.down", f"{tensors}.down_proj", config.hidden_size, inner, share, config.mlp_bias, setup
        )
        self._ops = setup.ops

    def __call__(self, x: Tensor) -> Tensor:
        """The MLP's summand for the residual stream, [T, E] of x [T, E]."""
        return self._down(self._ops.gate(self._gate_up(x)))

    def parameters(self) -> Iterator[Parameter]:
        """See `Part.parameters`."""
        yield from self._gate_up.parameters()
        yield from self._down.parameters()

    def pack(self) -> None:
        """See `Part.pack`."""
        self._gate_up.pack()
        self._down.pack()
