"""The MLPs of a layer: gated, and plain as older models have it.

Letters: T tokens of the step, E hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from baton.engine.models.config import ModelConfig
from baton.engine.models.parameters import Parameter
from baton.engine.models.parts.base import PartSetup
from baton.engine.models.parts.linear import Linear, Matrix

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
"""By the names of `ModelConfig.hidden_act`."""


def gate_of(activation: str, setup: PartSetup) -> Callable[[Tensor], Tensor]:
    """The function from gate and up side by side, [T, 2 I], to activation(gate) * up, [T, I]."""
    if activation == "silu":
        return setup.ops.gate
    return partial(_gate, ACTIVATIONS[activation])


def _gate(activation: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate).mul_(up)


class GatedMlp:
    """The MLP down(activation(gate(x)) * up(x)). See `Part`."""

    def __init__(self, name: str, tensors: str, inner: int, config: ModelConfig, setup: PartSetup) -> None:
        """`name` of its parameters, `tensors` of the checkpoint's, `inner`: I."""
        names = config.names
        share = setup.shard.share_of(inner, "rows of the MLP")
        matrices = [Matrix(f"{tensors}.{names.gate}", inner, share), Matrix(f"{tensors}.{names.up}", inner, share)]
        if names.gate_up:
            fused = f"{tensors}.{names.gate_up}"
            up = range(inner + share.start, inner + share.stop)
            matrices = [Matrix(fused, 2 * inner, share), Matrix(fused, 2 * inner, up)]
        self._gate_up = Linear.column_parallel(f"{name}.gate_up", matrices, config.hidden_size, config.mlp_bias, setup)
        self._down = Linear.row_parallel(
            f"{name}.down", f"{tensors}.{names.down}", config.hidden_size, inner, share, config.mlp_bias, setup
        )
        self._gate = gate_of(config.hidden_act, setup)

    def __call__(self, x: Tensor) -> Tensor:
        """The MLP's summand for the residual stream, [T, E] of x [T, E]."""
        return self._down(self._gate(self._gate_up(x)))

    def parameters(self) -> Iterator[Parameter]:
        """The parameters of gate and up, then of down."""
        yield from self._gate_up.parameters()
        yield from self._down.parameters()

    def pack(self) -> None:
        """Pack the products."""
        self._gate_up.pack()
        self._down.pack()


class PlainMlp:
    """The MLP down(activation(up(x))). See `Part`."""

    def __init__(self, name: str, tensors: str, inner: int, config: ModelConfig, setup: PartSetup) -> None:
        """`name` is for messages, `tensors` the prefix of names in the checkpoint, `inner` the size between the two
        products."""
        names = config.names
        share = setup.shard.share_of(inner, "rows of the MLP")
        self._up = Linear.column_parallel(
            f"{name}.up",
            [Matrix(f"{tensors}.{names.up}", inner, share)],
            config.hidden_size,
            config.mlp_bias,
            setup,
            is_transposed=names.is_transposed,
        )
        self._down = Linear.row_parallel(
            f"{name}.down",
            f"{tensors}.{names.down}",
            config.hidden_size,
            inner,
            share,
            config.mlp_bias,
            setup,
            is_transposed=names.is_transposed,
        )
        self._activation = ACTIVATIONS[config.hidden_act]

    def __call__(self, x: Tensor) -> Tensor:
        """The MLP's summand for the residual stream, [T, E] of x [T, E]."""
        return self._down(self._activation(self._up(x)))

    def parameters(self) -> Iterator[Parameter]:
        """The parameters of up, then of down."""
        yield from self._up.parameters()
        yield from self._down.parameters()

    def pack(self) -> None:
        """Pack the products."""
        self._up.pack()
        self._down.pack()
