"""The products of experts, and what they add up to for each token.

Owns the ways to compute the same: by one call of Baton's CPU kernels (`baton.engine.models.ops.native_experts`); on a
CPU without them expert by expert, each for its own tokens; on a GPU in bfloat16 by one kernel for all experts; on a GPU
in other dtypes, or quantized, each expert for all tokens, since what a graph records cannot ask how many tokens an
expert has. In each of them the result of a token depends on its own experts alone.

Letters: T tokens of the step, E hidden size, X experts, K experts of each token, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.models.linear_weights import LoadedWeight, PlainWeight
from baton.engine.models.ops.native_experts import SILU, GateKernel, NativeMatrix, NativeProducts
from baton.engine.models.ops.native_ops import NativeOps, NativeWeight
from baton.engine.models.parameters import Parameter
from baton.engine.models.parts.base import PartSetup
from baton.engine.models.parts.linear import Linear
from baton.engine.models.parts.mlp import gate_of

Gate: TypeAlias = Callable[[Tensor], Tensor]
"""From gate and up side by side, [T, 2 I], to [T, I]."""


@dataclass(frozen=True, slots=True)
class ExpertGate:
    """What becomes of gate and up. `kernel`: the same by the CPU kernels, None where they have no such gate."""

    compute: Gate
    kernel: GateKernel | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMatrices:
    """One expert: gate_up [2 I, E] and down [E, I], and their biases where there are some. `alternates`: rows of gate
    and up take turns, else all of gate are first."""

    gate_up: LoadedWeight
    down: LoadedWeight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    alternates: bool = False

    def gates_first(self) -> ExpertMatrices:
        """The same expert with all rows of gate before those of up."""
        if not self.alternates:
            return self
        return self._reordered(torch.arange(self.gate_up.num_rows).view(-1, 2).T.flatten())

    def alternating(self) -> ExpertMatrices:
        """The same expert with rows of gate and up in turns."""
        return self if self.alternates else self._reordered(torch.arange(self.gate_up.num_rows).view(2, -1).T.flatten())

    def _reordered(self, order: Tensor) -> ExpertMatrices:
        bias = None if self.gate_up_bias is None else self.gate_up_bias[order.to(self.gate_up_bias.device)]
        return replace(self, gate_up=self.gate_up.reordered(order), gate_up_bias=bias, alternates=not self.alternates)


class Products(Protocol):
    """The matrices of all experts of a layer, and how they are multiplied by."""

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts, [T, E] of x [T, E]. `chosen`: [T, K] experts, `weights`: [T, K]."""
        ...


def make_products(gate: ExpertGate, experts: Iterable[ExpertMatrices], setup: PartSetup) -> Products:
    """The fastest products of `experts` on the device. Experts are taken one after another, so each may be made when it
    is asked for."""
    if isinstance(setup.ops, NativeOps) and gate.kernel is not None:
        natives = [_native(expert.alternating(), setup, setup.ops) for expert in experts]
        return NativeProducts(setup.ops, gate.kernel, natives, setup.dtype)
    if setup.device.type == "cuda" and setup.dtype == torch.bfloat16 and not setup.quantization.name:
        return GroupedProducts(gate.compute, list(experts), setup.dtype)
    return products_of(gate.compute, [_packed(expert, setup) for expert in experts], setup)


def expert_gate(activation: str, setup: PartSetup) -> ExpertGate:
    """The gate of an activation, by its name in the config."""
    return ExpertGate(gate_of(activation, setup), SILU if activation == "silu" else None)


def quantized_products(
    gate: ExpertGate, experts: Sequence[tuple[Sequence[LoadedWeight], Sequence[LoadedWeight]]], setup: PartSetup
) -> Products:
    """The fastest products of gate_up and down of each expert, which stay quantized. Each is one weight, or several
    whose rows are one below the other."""
    weights = [weight for expert in experts for weight in expert]
    if isinstance(setup.ops, NativeOps) and all(len(each) == 1 and _has_own_order(each[0]) for each in weights):
        return make_products(gate, [ExpertMatrices(gate_up[0], down[0]) for gate_up, down in experts], setup)
    pairs = [(_linear(gate_up, None, setup), _linear(down, None, setup)) for gate_up, down in experts]
    return products_of(gate.compute, pairs, setup)


def _has_own_order(weight: LoadedWeight) -> bool:
    return isinstance(weight, PlainWeight) or weight.input_order is None


def products_of(gate: Gate, pairs: Sequence[tuple[Linear, Linear]], setup: PartSetup) -> Products:
    """The fastest products by any operations, of the packed gate_up and down of each expert."""
    return DenseProducts(gate, pairs) if setup.device.type == "cuda" else LoopedProducts(gate, pairs)


def _native(expert: ExpertMatrices, setup: PartSetup, ops: NativeOps) -> tuple[NativeMatrix, NativeMatrix]:
    def packed(weight: LoadedWeight, bias: Tensor | None) -> NativeMatrix:
        found = ops.pack(setup.quantization.quantized(weight))
        assert isinstance(found, NativeWeight)  # of every dtype that these operations are chosen for
        return NativeMatrix(found, None if bias is None else bias.contiguous())

    return packed(expert.gate_up, expert.gate_up_bias), packed(expert.down, expert.down_bias)


def _packed(expert: ExpertMatrices, setup: PartSetup) -> tuple[Linear, Linear]:
    expert = expert.gates_first()
    gate_up = _linear([expert.gate_up], expert.gate_up_bias, setup)
    return gate_up, _linear([expert.down], expert.down_bias, setup)


def _linear(weights: Sequence[LoadedWeight], bias: Tensor | None, setup: PartSetup) -> Linear:
    added = None if bias is None else Parameter("bias", bias.contiguous(), ())
    linear = Linear(weights, added, setup)
    linear.pack()
    return linear


class LoopedProducts:
    """Products that go expert by expert, each for its own tokens. See `Products`."""

    def __init__(self, gate: Gate, pairs: Sequence[tuple[Linear, Linear]]) -> None:
        """`pairs`: the products of each expert."""
        self._gate = gate
        self._pairs = pairs

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The experts' sum [T, E], expert by expert, each for its own tokens."""
        order, tokens = _sorted_by_expert(chosen)
        rows, factors = x[tokens], weights.flatten()[order, None].to(x.dtype)
        counts = torch.bincount(chosen.flatten(), minlength=len(self._pairs)).tolist()
        added = torch.zeros_like(x)
        first = 0
        for (gate_up, down), count in zip(self._pairs, counts, strict=True):
            if count == 0:
                continue
            own = slice(first, first + count)
            computed = down(self._gate(gate_up(rows[own])))
            # each token once: an expert's results go to different rows, in the order of the experts
            added.index_add_(0, tokens[own], computed * factors[own])
            first += count
        return added


class DenseProducts:
    """Products that go expert by expert, each for all tokens. See `Products`."""

    def __init__(self, gate: Gate, pairs: Sequence[tuple[Linear, Linear]]) -> None:
        """`pairs`: for each expert its products gate_up and down."""
        self._gate = gate
        self._pairs = pairs

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The experts' sum [T, E]: each expert computes all tokens, with the factor 0 for those that have not chosen
        it."""
        factors = weights.new_zeros(len(x), len(self._pairs)).scatter_(1, chosen, weights).to(x.dtype)
        added = torch.zeros_like(x)
        for expert, (gate_up, down) in enumerate(self._pairs):
            added += down(self._gate(gate_up(x))) * factors[:, expert, None]
        return added


class GroupedProducts:
    """All experts in one product over rows that are sorted by expert. See `Products`."""

    def __init__(self, gate: Gate, experts: Sequence[ExpertMatrices], dtype: torch.dtype) -> None:
        """`dtype`: of what is multiplied."""
        self._gate = gate
        self._num_experts = len(experts)
        experts = [expert.gates_first() for expert in experts]
        # [X, in, out], as the product takes them
        self._gate_up = torch.stack([expert.gate_up.plain(dtype) for expert in experts]).transpose(1, 2)
        self._down = torch.stack([expert.down.plain(dtype) for expert in experts]).transpose(1, 2)
        self._gate_up_biases = _stacked([expert.gate_up_bias for expert in experts])
        self._down_biases = _stacked([expert.down_bias for expert in experts])

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The experts' sum [T, E], by one grouped product for all experts."""
        order, tokens = _sorted_by_expert(chosen)
        experts = chosen.flatten()[order]
        of_expert = torch.arange(self._num_experts, device=x.device)[:, None]
        # not bincount, which asks the device for the largest number
        ends = (chosen.flatten() == of_expert).sum(1).cumsum(0).to(torch.int32)
        inner = _grouped(x[tokens], self._gate_up, self._gate_up_biases, experts, ends)
        computed = _grouped(self._gate(inner), self._down, self._down_biases, experts, ends)
        # back in the order of the tokens, where the sum over K has one order too
        unsorted = torch.empty_like(computed).index_copy_(0, order, computed).view(*chosen.shape, -1)
        return (unsorted * weights[:, :, None].to(x.dtype)).sum(1)


def _sorted_by_expert(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The choices [T * K] sorted by expert: their places in `chosen` [T, K], and their tokens."""
    order = chosen.flatten().argsort(stable=True)
    return order, order // chosen.shape[1]


def _grouped(x: Tensor, stack: Tensor, biases: Tensor | None, experts: Tensor, ends: Tensor) -> Tensor:
    product = F.grouped_mm(x, stack, offs=ends)
    return product if biases is None else product + biases[experts]


def _stacked(biases: Sequence[Tensor | None]) -> Tensor | None:
    there = [bias for bias in biases if bias is not None]
    return torch.stack(there) if there else None
