"""A short convolution in the place of a layer's attention: each channel adds up its last few inputs.

Owns the weights, those of a rank's channels. The inputs of earlier tokens are a state of the sequence, which
attention's pool keeps (`baton.engine.attention.block_states`).

Letters: T tokens of the step, E hidden size, L inputs that are added up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torch import Tensor

from baton.engine.attention.base import PLAIN, Attention, KeepsStates, LayerRule
from baton.engine.models.config import ModelConfig
from baton.engine.models.parameters import Box, Parameter, Source, whole
from baton.engine.models.parts.base import PartSetup
from baton.engine.models.parts.linear import Linear, Matrix
from baton.engine.models.rope import Rotations
from baton.engine.models.state_settings import ConvolutionSettings
from baton.wire.layout import STATE, LayerKv


class ShortConvolution:
    """out(C * convolution(B * x)), where B, C and x are products of the stream. See `Part`, and `GroupedQueryAttention`
    for `kv` and `rule`."""

    def __init__(self, layer: int, config: ModelConfig, settings: ConvolutionSettings, setup: PartSetup) -> None:
        name, size = f"layers.{layer}.convolution", config.hidden_size
        tensors = f"{config.names.layer(layer)}.{config.names.state}"
        share = setup.shard.share_of(size, "channels of a convolution")
        self.kv = LayerKv(settings.width - 1, len(share), kind=STATE)
        self.rule: LayerRule = PLAIN
        self._place = layer - setup.shard.layers_of(config.num_layers).start
        begins = (0, size, 2 * size) if len(share) < size else (0,)
        rows = share if len(share) < size else range(3 * size)
        matrices = [
            Matrix(f"{tensors}.in_proj", 3 * size, range(begin + rows.start, begin + rows.stop)) for begin in begins
        ]
        self._in = Linear.column_parallel(f"{name}.in", matrices, size, settings.has_bias, setup)
        self._out = Linear.row_parallel(
            f"{name}.out", f"{tensors}.out_proj", size, size, share, settings.has_bias, setup
        )
        self._weight = setup.empty(len(share), 1, settings.width)
        self._bias = setup.empty(len(share)) if settings.has_bias else None
        taken = (share, range(1), range(settings.width))
        self._parameters = [
            _parameter(f"{name}.weight", f"{tensors}.conv.weight", self._weight, (size, 1, settings.width), taken)
        ]
        if self._bias is not None:
            self._parameters.append(_parameter(f"{name}.bias", f"{tensors}.conv.bias", self._bias, (size,), (share,)))

    def __call__(self, x: Tensor, rotations: Rotations, attention: Attention) -> Tensor:
        """The convolution's summand for the residual stream, [T, E] of x [T, E]."""
        first, last, x = self._in(x).chunk(3, dim=-1)
        # a pool with states has no other attention
        states = cast(KeepsStates, attention)
        recent = states.recent(self._place, first * x, self.kv.num_kv_heads)
        states.stored()
        added = (recent * self._weight[:, 0].T).sum(dim=1)
        if self._bias is not None:
            added = added + self._bias
        return self._out(added.mul_(last))

    def parameters(self) -> Iterator[Parameter]:
        """The parameters of the products, then the weights of the convolution."""
        yield from self._in.parameters()
        yield from self._out.parameters()
        yield from self._parameters

    def pack(self) -> None:
        """Pack the products; the convolution stays as it is."""
        self._in.pack()
        self._out.pack()


def _parameter(name: str, tensor: str, weight: Tensor, shape: tuple[int, ...], taken: Box) -> Parameter:
    return Parameter(name, weight, (Source(tensor, shape, taken, whole(weight.shape)),))
