"""A gated delta net in the place of a layer's attention: a head carries on a matrix, which tokens fade and correct.

Owns the weights and the arithmetic around the recurrence, those of a rank's heads. Where matrices and last inputs lie
is `baton.engine.attention.block_states`, and `DecoderOps` carries matrices on. In a state they lie key head by key
head, so that a rank's share of it is in one piece. They are float32, whatever the model's dtype is.

Letters: T tokens of the step, E hidden size, Hk key heads, Hv value heads, Dk and Dv their sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.attention.base import PLAIN, Attention, KeepsStates, LayerRule
from baton.engine.models.config import ModelConfig
from baton.engine.models.ops.delta_rule import DeltaHeads
from baton.engine.models.parameters import Parameter, Source, whole
from baton.engine.models.parts.base import PartSetup
from baton.engine.models.parts.linear import Linear, Matrix
from baton.engine.models.rope import Rotations
from baton.engine.models.shard import scaled
from baton.engine.models.state_settings import DeltaSettings
from baton.wire.layout import STATE, LayerKv

_STATE_BYTES = torch.float32.itemsize
_EPSILON = 1e-6


class GatedDeltaNet:
    """The gated delta net of one layer, in the place of attention. It stores states and no keys: `kv` and `rule` say
    so."""

    def __init__(self, layer: int, config: ModelConfig, settings: DeltaSettings, setup: PartSetup) -> None:
        name, tensors = f"layers.{layer}.delta_net", f"{config.names.layer(layer)}.{config.names.state}"
        heads = setup.shard.share_of(settings.num_key_heads, "key heads of a delta net")
        repeats = settings.num_value_heads // settings.num_key_heads
        value_heads = scaled(heads, repeats)
        self._ops = setup.ops
        self._place, self._eps = layer - setup.shard.layers_of(config.num_layers).start, config.rms_norm_eps
        self._settings, self._num_keys, self._num_values = settings, len(heads), len(value_heads)
        self._sizes = [settings.key_dim, settings.key_dim, repeats * settings.value_dim]
        self._num_before = settings.width - 1
        num_bytes = len(value_heads) * settings.key_dim * settings.value_dim * _STATE_BYTES
        self._num_carried = num_bytes // setup.dtype.itemsize
        self.kv = LayerKv(
            self._num_before + _rows_carried(settings, setup.dtype),
            len(heads) * sum(self._sizes),
            kind=STATE,
            num_carried=self._num_carried,
        )
        self.rule: LayerRule = PLAIN
        matrices = list(_matrices(tensors, settings, heads))
        self._in = Linear.column_parallel(f"{name}.in", matrices, config.hidden_size, False, setup)
        num_values, columns = settings.num_value_heads * settings.value_dim, scaled(value_heads, settings.value_dim)
        self._out = Linear.row_parallel(
            f"{name}.out", f"{tensors}.out_proj", config.hidden_size, num_values, columns, False, setup
        )
        self._convolution = setup.empty(len(heads) * sum(self._sizes), 1, settings.width)
        self._time_bias, self._log_rate = setup.empty(len(value_heads)), setup.empty(len(value_heads))
        self._norm = setup.empty(settings.value_dim)
        of_heads = ((settings.num_value_heads,), (value_heads,), (range(len(value_heads)),))
        whole_norm = whole(self._norm.shape)
        self._parameters = [
            Parameter(f"{name}.convolution", self._convolution, _convolution(tensors, settings, heads)),
            Parameter(f"{name}.time_bias", self._time_bias, (Source(f"{tensors}.dt_bias", *of_heads),)),
            Parameter(f"{name}.log_rate", self._log_rate, (Source(f"{tensors}.A_log", *of_heads),)),
            Parameter(
                f"{name}.norm",
                self._norm,
                (Source(f"{tensors}.norm.weight", (settings.value_dim,), whole_norm, whole_norm),),
                center=1.0,
            ),
        ]

    def __call__(self, x: Tensor, rotations: Rotations, attention: Attention) -> Tensor:
        """The summand for the residual stream, [T, E] of x [T, E]."""
        widths = [self.kv.head_dim, self._num_keys * self._sizes[2], self._num_values, self._num_values]
        mixed, gate, beta, step = torch.split(self._in(x), widths, dim=-1)
        # a pool with states has no other attention
        states = cast(KeepsStates, attention)
        recent = states.recent(self._place, mixed, self._num_before)
        convolved = F.silu((recent * self._convolution[:, 0].T).sum(dim=1))
        q, k, v = torch.split(convolved.view(len(x), self._num_keys, -1), self._sizes, dim=-1)
        fading = -self._log_rate.float().exp() * F.softplus(step.float() + self._time_bias)
        heads = DeltaHeads(*self._heads(q, k, v), beta.sigmoid().float(), fading)
        matrices = self._matrices_in(states.carried(self._place, self._num_before, self._num_carried))
        carried = self._ops.carry_on(matrices, states.pieces, heads).to(x.dtype)
        states.stored()
        return self._out(self._gated_norm(carried, gate.view(carried.shape)).flatten(1))

    def _heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [T, Hv, Dk] of length 1 but for a factor, values [T, Hv, Dv]; float32. Of those of each key
        head."""
        normed = []
        for part in (q, k):
            heads = part.float()
            heads = heads * torch.rsqrt(heads.square().sum(dim=-1, keepdim=True) + _EPSILON)
            normed.append(heads.repeat_interleave(self._num_values // self._num_keys, dim=1))
        values = v.float().reshape(len(v), self._num_values, -1)
        return normed[0] * self._settings.key_dim**-0.5, normed[1], values

    def _matrices_in(self, carried: Tensor) -> Tensor:
        """[B, Hv, Dk, Dv] float32, a view of what is carried."""
        shape = (self._num_values, self._settings.key_dim, self._settings.value_dim)
        return carried.view(torch.float32).view(len(carried), *shape)

    def _gated_norm(self, carried: Tensor, gate: Tensor) -> Tensor:
        """The norm of each head of [T, Hv, Dv], times its gate."""
        normed = F.rms_norm(carried.float(), carried.shape[-1:], None, self._eps).to(carried.dtype)
        return ((self._norm * normed) * F.silu(gate.float())).to(carried.dtype)

    def parameters(self) -> Iterator[Parameter]:
        """The parameters of the products, then of the convolution, the decays and the norm."""
        yield from chain(self._in.parameters(), self._out.parameters(), self._parameters)

    def pack(self) -> None:
        """Pack the two products; the rest stays as it is."""
        self._in.pack()
        self._out.pack()


def _rows_carried(settings: DeltaSettings, dtype: torch.dtype) -> int:
    """Of all ranks: how many rows of all channels the matrices take."""
    num_bytes = settings.num_value_heads * settings.key_dim * settings.value_dim * _STATE_BYTES
    num_channels = 2 * settings.num_key_heads * settings.key_dim + settings.num_value_heads * settings.value_dim
    return -(-num_bytes // (num_channels * dtype.itemsize))


def _matrices(tensors: str, settings: DeltaSettings, heads: range) -> Iterator[Matrix]:
    """Rows of inputs of the convolution, gates, betas and steps, each of all these key heads, by which they are
    published; a head's inputs are its queries, keys and values."""
    repeats = settings.num_value_heads // settings.num_key_heads
    values = repeats * settings.value_dim
    published = {"in_proj_qkvz": (2 * settings.key_dim + values, values), "in_proj_ba": (repeats, repeats)}
    for name, sizes in published.items():
        of_head, begin = sum(sizes), 0
        for size in sizes:
            for head in heads:
                first = head * of_head + begin
                yield Matrix(f"{tensors}.{name}", settings.num_key_heads * of_head, range(first, first + size))
            begin += size


def _convolution(tensors: str, settings: DeltaSettings, heads: range) -> tuple[Source, ...]:
    """The channels of these key heads, head by head; they are published as all queries, all keys, all values."""
    values = settings.num_value_heads // settings.num_key_heads * settings.value_dim
    sizes = (settings.key_dim, settings.key_dim, values)
    shape = (settings.num_key_heads * sum(sizes), 1, settings.width)
    others, found, place = (range(1), range(settings.width)), [], 0
    for head in heads:
        begin = 0
        for size in sizes:
            taken = range(begin + head * size, begin + (head + 1) * size)
            found.append(
                Source(f"{tensors}.conv1d.weight", shape, (taken, *others), (range(place, place + size), *others))
            )
            begin, place = begin + settings.num_key_heads * size, place + size
    return tuple(found)
