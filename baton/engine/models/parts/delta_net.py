"""A gated delta net in the place of a layer's attention: a head carries on a matrix, which tokens fade and correct.

Owns the weights and the arithmetic, those of a rank's heads. Where the matrices and the last inputs lie is
`baton.engine.attention.block_states`. In a state they lie key head by key head, so that a rank's share of it is in one
piece. Tokens of a block are computed together: what each of them corrects depends on those before it, which is a
triangular system of equations. Matrices are float32, whatever the model's dtype is.

Letters: T tokens of the step, E hidden size, Hk key heads, Hv value heads, Dk and Dv their sizes, n tokens of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.attention.base import PLAIN, Attention, KeepsStates, LayerRule, StatePiece
from baton.engine.models.config import ModelConfig
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
        heads = (*self._heads(q, k, v), beta.sigmoid().float(), fading)
        carried = self._carry_on(states, *heads).to(x.dtype)
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

    def _carry_on(self, states: KeepsStates, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, fading: Tensor) -> Tensor:
        """[T, Hv, Dv]; the matrices in the states are brought up to date."""
        out = torch.zeros_like(v)
        pieces = states.pieces
        if not pieces:
            return out
        matrices = self._matrices_in(states.carried(self._place, self._num_before, self._num_carried))
        for together in _computed_together(pieces):
            tokens = torch.tensor([range(piece.first, piece.last) for piece in together], device=v.device)
            # [pieces, Hv, n, ...]
            of_pieces = [part[tokens].transpose(1, 2) for part in (q, k, v, beta, fading)]
            found, after = carry_on(_before(matrices, together), *of_pieces)
            out[tokens] = found.transpose(1, 2)
            matrices[torch.tensor([piece.block for piece in together], device=v.device)] = after
        return out

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


def carry_on(before: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, fading: Tensor) -> tuple[Tensor, Tensor]:
    """Carry the matrices of heads on over n tokens. Returns what the tokens read, [..., n, Dv], and the matrices [...,
    Dk, Dv] behind them.

    A token multiplies the matrix by e to its `fading` [..., n]. It then adds the outer product of its key and of its
    value minus what that key reads, times `beta` [..., n]. At last it reads by its query. q, k: [..., n, Dk]; v: [...,
    n, Dv]; before: [..., Dk, Dv].
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


def _computed_together(pieces: Sequence[StatePiece]) -> Iterator[Sequence[StatePiece]]:
    """Pieces of which none needs another: of each level those of a single token, and the others one by one."""
    by_level = attrgetter("level")
    for _, of_level in groupby(sorted(pieces, key=by_level), by_level):
        here = list(of_level)
        single = [piece for piece in here if piece.last - piece.first == 1]
        if single:
            yield single
        yield from ([piece] for piece in here if piece.last - piece.first > 1)


def _before(matrices: Tensor, pieces: Sequence[StatePiece]) -> Tensor:
    """The matrices before each piece, zeros at the begin of a sequence."""
    before = matrices[torch.tensor([piece.before or 0 for piece in pieces], device=matrices.device)]
    is_first = torch.tensor([piece.before is None for piece in pieces], device=matrices.device)
    # by a choice and not by a product: what an unused block holds may be NaN
    return before.masked_fill_(is_first[:, None, None, None], 0.0)


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
