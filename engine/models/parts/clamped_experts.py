"""The experts of gpt-oss: products with biases, and a gate whose inputs are clamped.

Owns their published forms, plain and MXFP4; gate and up are every other row. Either becomes matrices in the model's
dtype, one expert at a time, when it is packed. The sums are those of `engine.models.parts.experts`.

Letters: T tokens of the step, E hidden size, X experts, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.expert_settings import ExpertSettings
from engine.models.mxfp4 import GROUP, GROUP_BYTES, from_mxfp4
from engine.models.parameters import Parameter, Source, whole
from engine.models.parts.base import PartSetup
from engine.models.parts.expert_products import ExpertMatrices, Products, make_products
from wire.errors import ModelLoadError


class ClampedExperts:
    """Gated MLPs, of which each token has its own. See `Part`."""

    def __init__(
        self, name: str, tensors: str, settings: ExpertSettings, config: ModelConfig, setup: PartSetup
    ) -> None:
        """See `SparseMlp`."""
        if setup.shard.size > 1:
            raise ModelLoadError(f"experts of {config.architecture} cannot be divided among ranks")
        inner, size = settings.intermediate_size, config.hidden_size
        form = _Mxfp4 if settings.is_mxfp4 else _Plain
        self._gate_up = form(name, f"{tensors}.gate_up_proj", settings.num_experts, 2 * inner, size, setup)
        self._down = form(name, f"{tensors}.down_proj", settings.num_experts, size, inner, setup)
        self._settings = settings
        self._setup = setup
        self._products: Products | None = None

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[T, E] of x [T, E], the experts `chosen` [T, K] and their `weights` [T, K]."""
        assert self._products is not None  # packed
        return self._products(x, chosen, weights)

    def parameters(self) -> Iterator[Parameter]:
        """See `Part.parameters`."""
        yield from self._gate_up.parameters
        yield from self._down.parameters

    def pack(self) -> None:
        """See `Part.pack`."""
        num_rows = 2 * self._settings.intermediate_size
        # gates first, as everywhere else
        order = torch.cat((torch.arange(0, num_rows, 2), torch.arange(1, num_rows, 2))).to(self._setup.device)
        experts = (self._expert(number, order) for number in range(self._settings.num_experts))
        self._products = make_products(self._gate, experts, self._setup)
        self._gate_up.free()
        self._down.free()

    def _expert(self, number: int, order: Tensor) -> ExpertMatrices:
        gate_up, gate_up_bias = self._gate_up.expert(number)
        down, down_bias = self._down.expert(number)
        return ExpertMatrices(gate_up[order], down, gate_up_bias[order], down_bias)

    def _gate(self, gate_up: Tensor) -> Tensor:
        """[T, I] of gate and up side by side."""
        limit = self._settings.gate_limit
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self._settings.gate_slope))


class _Plain:
    """Matrices [in, out] of all experts, and their biases."""

    def __init__(self, name: str, tensor: str, count: int, num_out: int, num_in: int, setup: PartSetup) -> None:
        self._setup = setup
        self._bias = setup.empty(count, num_out)
        self._matrices = setup.empty(count, num_in, num_out)
        self.parameters = [
            _whole(f"{name}.{tensor}", tensor, self._matrices),
            _whole(f"{name}.{tensor}.bias", f"{tensor}_bias", self._bias),
        ]

    def expert(self, number: int) -> tuple[Tensor, Tensor]:
        """The matrix [out, in] of an expert, and its bias [out]."""
        return self._matrix(number), self._bias[number]

    def free(self) -> None:
        """Forget what was loaded."""
        self.parameters = []
        self._matrices = self._matrices[:0]

    def _matrix(self, expert: int) -> Tensor:
        return self._matrices[expert].T


class _Mxfp4(_Plain):
    """The same in MXFP4."""

    def __init__(self, name: str, tensor: str, count: int, num_out: int, num_in: int, setup: PartSetup) -> None:
        if num_in % GROUP:
            raise ModelLoadError(f"{tensor}: {num_in} inputs are no multiple of {GROUP}, as MXFP4 needs")
        self._setup = setup
        self._bias = setup.empty(count, num_out)
        groups = (count, num_out, num_in // GROUP)
        self._blocks = torch.empty(*groups, GROUP_BYTES, dtype=torch.uint8, device=setup.device)
        self._scales = torch.empty(groups, dtype=torch.uint8, device=setup.device)
        held = count * num_out * num_in * setup.dtype.itemsize
        self.parameters = [
            _whole(f"{name}.{tensor}.blocks", f"{tensor}_blocks", self._blocks, held),
            _whole(f"{name}.{tensor}.scales", f"{tensor}_scales", self._scales),
            _whole(f"{name}.{tensor}.bias", f"{tensor}_bias", self._bias),
        ]

    def free(self) -> None:
        """Forget what was loaded."""
        self.parameters = []
        self._blocks, self._scales = self._blocks[:0], self._scales[:0]

    def _matrix(self, expert: int) -> Tensor:
        return from_mxfp4(self._blocks[expert], self._scales[expert], self._setup.dtype)


def _whole(name: str, tensor: str, values: Tensor, held_bytes: int = 0) -> Parameter:
    box = whole(tuple(values.shape))
    return Parameter(name, values, (Source(tensor, tuple(values.shape), box, box),), held_bytes=held_bytes)
