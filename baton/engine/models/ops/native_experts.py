"""The experts of a layer by Baton's CPU kernels: one call chooses them, and one computes all that are chosen.

Owns the arguments of both. A recording holds them, so nothing in them depends on a step but what its rows are.

Letters: T tokens of the step, E hidden size, X experts, K experts of each token, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.models.expert_settings import ExpertSettings, Scoring
from baton.engine.models.ops.native_ops import NativeOps, NativeWeight
from baton.engine.native.arguments import DTYPES, BatonLinear, BatonRoundedLinear
from baton.engine.native.expert_arguments import (
    CLAMPED_GATE,
    PLAIN_CODES,
    SILU_GATE,
    BatonExperts,
    BatonExpertWeight,
    BatonRouting,
)

_SCORINGS: dict[Scoring, int] = {"softmax": 0, "sigmoid": 1, "softmax_of_chosen": 2}
"""`BatonScoring`."""


@dataclass(frozen=True, slots=True)
class GateKernel:
    """A gate that the kernels compute, `BatonGateKind`, with its clamps."""

    kind: int
    limit: float = 0.0
    slope: float = 0.0


SILU = GateKernel(SILU_GATE)


def clamped(limit: float, slope: float) -> GateKernel:
    """The gate of gpt-oss."""
    return GateKernel(CLAMPED_GATE, limit, slope)


@dataclass(frozen=True, slots=True, eq=False)
class NativeMatrix:
    """A packed matrix of an expert, and its bias if it has one."""

    weight: NativeWeight
    bias: Tensor | None

    def arguments(self) -> BatonExpertWeight:
        """How the kernels take it."""
        product, bias = self.weight.product, None if self.bias is None else self.bias.data_ptr()
        if isinstance(product, BatonLinear):
            return BatonExpertWeight(product.packed, bias, codes_kind=PLAIN_CODES)
        kinds = (product.codes_kind, product.scale_dtype, product.has_offsets)
        is_rounded = int(isinstance(product, BatonRoundedLinear))
        return BatonExpertWeight(product.packed, bias, product.group_size, *kinds, is_rounded)


class NativeProducts:
    """All experts of a layer in one call. See `Products` of `baton.engine.models.parts.expert_products`."""

    def __init__(
        self, ops: NativeOps, gate: GateKernel, experts: Sequence[tuple[NativeMatrix, NativeMatrix]], dtype: torch.dtype
    ) -> None:
        """`experts`: gate_up [2 I, E], whose rows take turns, and down [E, I] of each."""
        self._kernels = ops.kernels
        self._experts = experts  # whose memory the arguments name
        self._gate_ups, self._downs = (
            (BatonExpertWeight * len(experts))(*(pair[place].arguments() for pair in experts)) for place in (0, 1)
        )
        self._rounds = any(weight.is_rounded for weight in (*self._gate_ups, *self._downs))
        down = experts[0][1].weight.product
        self._call = BatonExperts(
            gate_up=addressof(self._gate_ups),
            down=addressof(self._downs),
            size=down.num_out,
            inner=down.num_in,
            num_experts=len(experts),
            gate_limit=gate.limit,
            gate_slope=gate.slope,
            dtype=DTYPES[dtype],
            gate=gate.kind,
        )

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts, [T, E] of x [T, E]. `chosen`: [T, K] experts, `weights`: [T, K]."""
        call, kernels = self._call, self._kernels
        factors = weights.to(x.dtype)
        out = kernels.empty(x.shape, x.dtype)
        num_bytes = kernels.expert_scratch(call, chosen.shape[1], rounds=self._rounds)
        scratch = kernels.empty((len(x), num_bytes), torch.uint8)
        call.out, call.x, call.x_stride = out.data_ptr(), x.data_ptr(), x.stride(0)
        call.chosen, call.weights, call.scratch = chosen.data_ptr(), factors.data_ptr(), scratch.data_ptr()
        call.num_tokens, call.num_chosen = chosen.shape
        kernels.experts(call)
        return out


class NativeRouting:
    """Chooses the experts of each token. See `baton.engine.models.parts.routing`."""

    def __init__(
        self,
        ops: NativeOps,
        settings: ExpertSettings,
        weight: NativeWeight,
        bias: Tensor | None,
        correction: Tensor | None,
    ) -> None:
        """`weight`: [X, E], of this routing alone; `bias` and `correction`: [X]."""
        self._ops, self._settings = ops, settings
        self._weight, self._bias, self._correction = weight, bias, correction
        weight.product.out_is_float32 = int(settings.has_float32_routing)
        self._call = BatonRouting(
            correction=None if correction is None else correction.data_ptr(),
            num_experts=settings.num_experts,
            num_chosen=settings.num_chosen,
            logit_stride=settings.num_experts,
            num_groups=settings.num_groups,
            num_chosen_groups=settings.num_chosen_groups,
            num_best_of_group=settings.num_best_of_group,
            scaling=settings.scaling,
            logits_are_float32=int(settings.has_float32_routing),
            scoring=_SCORINGS[settings.scoring],
            normalizes=int(settings.normalizes),
        )

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts [T, K] int64 of x [T, E], and the weights [T, K] of their results, in the dtype of x."""
        call, kernels, settings = self._call, self._ops.kernels, self._settings
        wide = torch.float32 if settings.has_float32_routing else x.dtype
        logits = kernels.empty((len(x), settings.num_experts), wide)
        self._ops.multiply(logits, x, self._weight, self._bias)
        chosen = kernels.empty((len(x), settings.num_chosen), torch.int64)
        weights = kernels.empty((len(x), settings.num_chosen), x.dtype)
        call.chosen, call.weights, call.logits = chosen.data_ptr(), weights.data_ptr(), logits.data_ptr()
        call.num_tokens, call.dtype = len(x), DTYPES[x.dtype]
        kernels.route(call)
        return chosen, weights
