"""A gated delta net in the place of a layer's attention: a head carries on a matrix, which tokens fade and correct.

Owns the weights and the arithmetic. Where the matrices and the last inputs lie is `engine.attention.block_states`.
Tokens of a block are computed together: what each of them corrects depends on those before it, which is a triangular
system of equations. Matrices are float32, whatever the model's dtype is.

Letters: T tokens of the step, E hidden size, Hk key heads, Hv value heads, Dk and Dv their sizes, n tokens of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.base import PLAIN, Attention, KeepsStates, LayerRule, StatePiece
from engine.models.config import ModelConfig
from engine.models.parameters import Parameter, Source, whole
from engine.models.parts.base import PartSetup
from engine.models.parts.linear import Linear, Matrix
from engine.models.rope import Rotations
from engine.models.state_settings import DeltaSettings
from wire.layout import STATE, LayerKv

_STATE_BYTES = torch.float32.itemsize
_EPSILON = 1e-6


class GatedDeltaNet:
    """See `Part`, and `GroupedQueryAttention` for `kv` and `rule`."""

    def __init__(self, layer: int, config: ModelConfig, settings: DeltaSettings, setup: PartSetup) -> None:
        name, tensors = f"layers.{layer}.delta_net", f"{config.names.layer(layer)}.{config.names.state}"
        num_keys, num_values = settings.num_key_heads * settings.key_dim, settings.num_value_heads * settings.value_dim
        num_channels = 2 * num_keys + num_values
        self._layer, self._settings, self._eps = layer, settings, config.rms_norm_eps
        self._widths = [num_keys, num_keys, num_values]
        self._num_before = settings.width - 1
        self._num_carried = settings.num_value_heads * settings.key_dim * settings.value_dim
        carried_elements = self._num_carried * _STATE_BYTES // setup.dtype.itemsize
        self.kv = LayerKv(self._num_before + -(-carried_elements // num_channels), num_channels, kind=STATE)
        self.rule: LayerRule = PLAIN
        matrices = list(_matrices(tensors, settings))
        self._in = Linear.column_parallel(f"{name}.in", matrices, config.hidden_size, False, setup)
        self._out = Linear.row_parallel(
            f"{name}.out", f"{tensors}.out_proj", config.hidden_size, num_values, range(num_values), False, setup
        )
        self._convolution = setup.empty(num_channels, 1, settings.width)
        self._time_bias, self._log_rate = setup.empty(settings.num_value_heads), setup.empty(settings.num_value_heads)
        self._norm = setup.empty(settings.value_dim)
        self._parameters = [
            _parameter(f"{name}.convolution", f"{tensors}.conv1d.weight", self._convolution),
            _parameter(f"{name}.time_bias", f"{tensors}.dt_bias", self._time_bias),
            _parameter(f"{name}.log_rate", f"{tensors}.A_log", self._log_rate),
            _parameter(f"{name}.norm", f"{tensors}.norm.weight", self._norm, center=1.0),
        ]

    def __call__(self, x: Tensor, rotations: Rotations, attention: Attention) -> Tensor:
        """The summand for the residual stream, [T, E] of x [T, E]."""
        num_heads = self._settings.num_value_heads
        widths = [sum(self._widths), self._widths[2], num_heads, num_heads]
        mixed, gate, beta, step = torch.split(self._in(x), widths, dim=-1)
        # a pool with states has no other attention
        states = cast(KeepsStates, attention)
        recent = states.recent(self._layer, mixed, self._num_before)
        convolved = F.silu((recent * self._convolution[:, 0].T).sum(dim=1))
        q, k, v = torch.split(convolved, self._widths, dim=-1)
        fading = -self._log_rate.float().exp() * F.softplus(step.float() + self._time_bias)
        heads = (*self._heads(q, k, v), beta.sigmoid().float(), fading)
        carried = self._carry_on(states, *heads).to(x.dtype)
        states.stored()
        return self._out(self._gated_norm(carried, gate.view(carried.shape)).flatten(1))

    def _heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [T, Hv, Dk] of length 1 but for a factor, values [T, Hv, Dv]; float32."""
        settings = self._settings
        repeats = settings.num_value_heads // settings.num_key_heads
        normed = []
        for part in (q, k):
            heads = part.float().view(len(part), settings.num_key_heads, settings.key_dim)
            heads = heads * torch.rsqrt(heads.square().sum(dim=-1, keepdim=True) + _EPSILON)
            normed.append(heads.repeat_interleave(repeats, dim=1))
        values = v.float().view(len(v), settings.num_value_heads, settings.value_dim)
        return normed[0] * settings.key_dim**-0.5, normed[1], values

    def _carry_on(self, states: KeepsStates, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, fading: Tensor) -> Tensor:
        """[T, Hv, Dv]; the matrices in the states are brought up to date."""
        out = torch.zeros_like(v)
        pieces = states.pieces
        if not pieces:
            return out
        matrices = self._matrices_in(states.carried(self._layer, self._num_before))
        single = [piece for piece in pieces if piece.is_alone and piece.last - piece.first == 1]
        longer = [[piece] for piece in pieces if not (piece.is_alone and piece.last - piece.first == 1)]
        for together in [single, *longer] if single else longer:
            tokens = torch.tensor([range(piece.first, piece.last) for piece in together], device=v.device)
            # [pieces, Hv, n, ...]
            of_pieces = [part[tokens].transpose(1, 2) for part in (q, k, v, beta, fading)]
            found, after = carry_on(_before(matrices, together), *of_pieces)
            out[tokens] = found.transpose(1, 2)
            matrices[torch.tensor([piece.block for piece in together], device=v.device)] = after
        return out

    def _matrices_in(self, carried: Tensor) -> Tensor:
        """[B, Hv, Dk, Dv] float32, a view of rows [B, rows, channels]."""
        settings = self._settings
        flat = carried.flatten(1).view(torch.float32)[:, : self._num_carried]
        return flat.view(len(flat), settings.num_value_heads, settings.key_dim, settings.value_dim)

    def _gated_norm(self, carried: Tensor, gate: Tensor) -> Tensor:
        """The norm of each head of [T, Hv, Dv], times its gate."""
        normed = F.rms_norm(carried.float(), carried.shape[-1:], None, self._eps).to(carried.dtype)
        return ((self._norm * normed) * F.silu(gate.float())).to(carried.dtype)

    def parameters(self) -> Iterator[Parameter]:
        """See `Part.parameters`."""
        yield from chain(self._in.parameters(), self._out.parameters(), self._parameters)

    def pack(self) -> None:
        """See `Part.pack`."""
        self._in.pack()
        self._out.pack()


def carry_on(before: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, fading: Tensor) -> tuple[Tensor, Tensor]:
    """What n tokens read, [..., n, Dv], and the matrices [..., Dk, Dv] behind them.

    A token multiplies the matrix by e to its `fading` [..., n], adds the outer product of its key and of what its value
    differs from what that key reads, times `beta` [..., n], and reads the result by its query. q, k: [..., n, Dk];
    v: [..., n, Dv]; before: [..., Dk, Dv].
    """
    faded = fading.cumsum(dim=-1)
    # how much of what a token has added is left at another one, which comes later
    left = (faded[..., :, None] - faded[..., None, :]).exp().tril()
    from_begin = faded.exp()[..., None]
    among = (k @ k.mT * left).tril(-1) * beta[..., None]
    wanted = beta[..., None] * (v - from_begin * (k @ before))
    added = torch.linalg.solve_triangular(among, wanted, upper=False, unitriangular=True)
    read = from_begin * (q @ before) + (q @ k.mT * left) @ added
    last = faded[..., -1:]
    after = before * last.exp()[..., None] + (k * (last - faded).exp()[..., None]).mT @ added
    return read, after


def _before(matrices: Tensor, pieces: Sequence[StatePiece]) -> Tensor:
    """The matrices before each piece, zeros at the begin of a sequence."""
    before = matrices[torch.tensor([piece.before or 0 for piece in pieces], device=matrices.device)]
    is_first = torch.tensor([piece.before is None for piece in pieces], device=matrices.device)
    # by a choice and not by a product: what an unused block holds may be NaN
    return before.masked_fill_(is_first[:, None, None, None], 0.0)


def _matrices(tensors: str, settings: DeltaSettings) -> Iterator[Matrix]:
    """Rows of queries, keys, values, gates, betas and steps, each of all heads; they are published key head by key
    head."""
    num_key_heads = settings.num_key_heads
    repeats = settings.num_value_heads // num_key_heads
    values = repeats * settings.value_dim
    published = {
        "in_proj_qkvz": (settings.key_dim, settings.key_dim, values, values),
        "in_proj_ba": (repeats, repeats),
    }
    for name, sizes in published.items():
        of_head, begin = sum(sizes), 0
        for size in sizes:
            for head in range(num_key_heads):
                first = head * of_head + begin
                yield Matrix(f"{tensors}.{name}", num_key_heads * of_head, range(first, first + size))
            begin += size


def _parameter(name: str, tensor: str, weight: Tensor, center: float = 0.0) -> Parameter:
    shape = tuple(weight.shape)
    return Parameter(name, weight, (Source(tensor, shape, whole(shape), whole(shape)),), center=center)
