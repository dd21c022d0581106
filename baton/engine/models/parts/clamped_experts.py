"""The experts of gpt-oss: products with biases, and a gate whose inputs are clamped.

Owns their published forms, plain and MXFP4; gate and up are every other row. MXFP4 keeps its 4 bits, but where products
take plain matrices alone. The sums are those of `baton.engine.models.parts.expert_products`.

Letters: T tokens of the step, E hidden size, X experts, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from baton.engine.models.config import ModelConfig
from baton.engine.models.expert_settings import MXFP4_GROUP, ExpertSettings
from baton.engine.models.linear_weights import LoadedWeight, PlainWeight
from baton.engine.models.mxfp4 import GROUP_BYTES, from_mxfp4
from baton.engine.models.ops.native_experts import clamped
from baton.engine.models.parameters import Parameter, Source, whole
from baton.engine.models.parts.base import PartSetup
from baton.engine.models.parts.expert_products import ExpertGate, ExpertMatrices, Products, make_products
from baton.engine.models.shard import scaled
from baton.wire.errors import ModelLoadError


class ClampedExperts:
    """The experts of gpt-oss: gated MLPs, of which each token has its own. See `Part`."""

    def __init__(
        self, name: str, tensors: str, settings: ExpertSettings, config: ModelConfig, setup: PartSetup
    ) -> None:
        """Allocate this rank's share of all experts. `name` is for messages, `tensors` the prefix of names in the
        checkpoint."""
        inner, size = settings.intermediate_size, range(config.hidden_size)
        share = setup.shard.share_of(inner, "rows of an expert")
        form, whole_size = _Mxfp4 if settings.is_mxfp4 else _Plain, len(size)
        gate_up = _Cut(settings.num_experts, 2 * inner, whole_size, scaled(share, 2), size, scaled(share, 2))
        # what ranks compute is added up, so one of them adds the bias
        biased = size if setup.shard.rank == 0 else range(0)
        down = _Cut(settings.num_experts, whole_size, inner, size, share, biased)
        self._gate_up = form(name, f"{tensors}.gate_up_proj", gate_up, setup)
        self._down = form(name, f"{tensors}.down_proj", down, setup)
        self._num_experts = settings.num_experts
        self._settings = settings
        self._setup = setup
        self._products: Products | None = None

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts, [T, E] of x [T, E]. `chosen`: [T, K] experts, `weights`: [T, K]."""
        assert self._products is not None  # packed
        return self._products(x, chosen, weights)

    def parameters(self) -> Iterator[Parameter]:
        """The parameters of gate and up, then of down."""
        yield from self._gate_up.parameters
        yield from self._down.parameters

    def pack(self) -> None:
        """Hand the experts to the products, one at a time; free what was loaded."""
        experts = (self._expert(number) for number in range(self._num_experts))
        self._products = make_products(self._gate(), experts, self._setup)
        self._gate_up.free()
        self._down.free()

    def _expert(self, number: int) -> ExpertMatrices:
        gate_up, gate_up_bias = self._gate_up.expert(number)
        down, down_bias = self._down.expert(number)
        return ExpertMatrices(gate_up, down, gate_up_bias, down_bias if len(down_bias) else None, alternates=True)

    def _gate(self) -> ExpertGate:
        limit, slope = self._settings.gate_limit, self._settings.gate_slope
        return ExpertGate(partial(clamped_gate, limit, slope), clamped(limit, slope))


def clamped_gate(limit: float, slope: float, gate_up: Tensor) -> Tensor:
    """[T, I] of gate and up side by side."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * slope))


@dataclass(frozen=True, slots=True)
class _Cut:
    """This rank's `rows` and `columns` of matrices [num_out, num_in], one for each of `count` experts, and the rows
    that it has of their biases."""

    count: int
    num_out: int
    num_in: int
    rows: range
    columns: range
    biased: range


class _Plain:
    """Matrices [in, out] of all experts, and their biases."""

    def __init__(self, name: str, tensor: str, cut: _Cut, setup: PartSetup) -> None:
        self._setup = setup
        self._bias = setup.empty(cut.count, len(cut.biased))
        self._matrices = setup.empty(cut.count, len(cut.columns), len(cut.rows))
        shape = (cut.count, cut.num_in, cut.num_out)
        self.parameters = [
            _taken(f"{name}.{tensor}", tensor, shape, self._matrices, cut.columns, cut.rows),
            _taken(f"{name}.{tensor}.bias", f"{tensor}_bias", (cut.count, cut.num_out), self._bias, cut.biased),
        ]

    def expert(self, number: int) -> tuple[LoadedWeight, Tensor]:
        """The weight [out, in] of an expert, and its bias [out], without elements where another rank has it."""
        return self._weight(number), self._bias[number]

    def free(self) -> None:
        """Forget what was loaded."""
        self.parameters = []
        self._matrices = self._matrices.new_empty(0)  # a view would keep all

    def _weight(self, expert: int) -> LoadedWeight:
        return PlainWeight(self._matrices[expert].T.contiguous())


class _Mxfp4(_Plain):
    """The same in MXFP4."""

    def __init__(self, name: str, tensor: str, cut: _Cut, setup: PartSetup) -> None:
        num_in = len(cut.columns)
        if num_in % MXFP4_GROUP:
            raise ModelLoadError(f"{tensor}: {num_in} inputs are no multiple of {MXFP4_GROUP}, as MXFP4 needs")
        self._setup = setup
        self._bias = setup.empty(cut.count, len(cut.biased))
        groups = range(cut.columns.start // MXFP4_GROUP, cut.columns.stop // MXFP4_GROUP)
        own = (cut.count, len(cut.rows), len(groups))
        self._blocks = torch.empty(*own, GROUP_BYTES, dtype=torch.uint8, device=setup.device)
        self._scales = torch.empty(own, dtype=torch.uint8, device=setup.device)
        shape = (cut.count, cut.num_out, cut.num_in // MXFP4_GROUP)
        blocks, scales, bias = (f"{tensor}_{part}" for part in ("blocks", "scales", "bias"))
        self.parameters = [
            _taken(
                f"{name}.{blocks}", blocks, (*shape, GROUP_BYTES), self._blocks, cut.rows, groups, range(GROUP_BYTES)
            ),
            _taken(f"{name}.{scales}", scales, shape, self._scales, cut.rows, groups),
            _taken(f"{name}.{bias}", bias, shape[:2], self._bias, cut.biased),
        ]
        # grouped products of a GPU take plain matrices
        gpu_bytes = cut.count * len(cut.rows) * num_in * setup.dtype.itemsize
        self.parameters[0] = replace(self.parameters[0], gpu_bytes=gpu_bytes)

    def free(self) -> None:
        """Forget what was loaded."""
        self.parameters = []
        self._blocks, self._scales = self._blocks.new_empty(0), self._scales.new_empty(0)  # views would keep all

    def _weight(self, expert: int) -> LoadedWeight:
        return from_mxfp4(self._blocks[expert], self._scales[expert], self._setup.dtype)


def _taken(name: str, tensor: str, shape: tuple[int, ...], values: Tensor, *places: range) -> Parameter:
    """Of each expert, what is in `places` of the other dimensions."""
    source = Source(tensor, shape, (range(shape[0]), *places), whole(tuple(values.shape)))
    return Parameter(name, values, (source,))
