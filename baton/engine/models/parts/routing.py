"""How tokens choose experts, as transformers rounds it.

Owns the weights of routing. What the experts compute is `experts.py`.

Letters: T tokens of the step, E hidden size, X experts, K experts of each token, G groups of experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.models.config import ModelConfig
from baton.engine.models.expert_settings import ExpertSettings
from baton.engine.models.linear_weights import PlainWeight
from baton.engine.models.ops.native_experts import NativeRouting
from baton.engine.models.ops.native_ops import NativeOps, NativeWeight
from baton.engine.models.parameters import Parameter, Source, whole
from baton.engine.models.parts.base import PartSetup


class ExpertRouting:
    """Chooses the K experts that each token goes to, by scores [T, X]. See `Part`."""

    def __init__(
        self, name: str, tensors: str, settings: ExpertSettings, config: ModelConfig, setup: PartSetup
    ) -> None:
        """`tensors`: what the checkpoint's names begin with."""
        shape = (settings.num_experts, config.hidden_size)
        self._settings = settings
        self._ops = setup.ops
        self._native: NativeRouting | None = None
        self._weight = setup.empty(*shape)
        self._parameters = [
            Parameter(
                f"{name}.routing", self._weight, (Source(f"{tensors}.weight", shape, whole(shape), whole(shape)),)
            )
        ]
        self._bias = setup.empty(settings.num_experts) if settings.is_clamped else None
        self._correction: Tensor | None = None
        if settings.has_correction:
            # float32 in every checkpoint and every computation: neighbours in a coarser type would be one score
            self._correction = torch.empty(settings.num_experts, dtype=torch.float32, device=setup.device)
        for part, values in (("bias", self._bias), ("e_score_correction_bias", self._correction)):
            if values is not None:
                box = whole((settings.num_experts,))
                source = Source(f"{tensors}.{part}", (settings.num_experts,), box, box)
                self._parameters.append(Parameter(f"{name}.routing.{part}", values, (source,)))

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts [T, K] int64 of x [T, E], and the weights [T, K] of their results."""
        if self._native is not None:
            return self._native(x)
        settings = self._settings
        if settings.scoring == "softmax_of_chosen":
            best, chosen = F.linear(x, self._weight, self._bias).topk(settings.num_chosen, dim=-1)
            return chosen, torch.softmax(best, dim=-1)
        scores = self._scores(x)
        choice = scores if self._correction is None else scores + self._correction
        if settings.num_groups > 1:
            choice = choice.masked_fill(self._outside_of_groups(choice), -math.inf)
        chosen = choice.topk(settings.num_chosen, dim=-1)[1]
        weights = scores.gather(1, chosen)
        if settings.normalizes:
            # what is added keeps a division by zero away, and changes no other float32
            weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
        return chosen, weights * settings.scaling if settings.scaling != 1.0 else weights

    def _scores(self, x: Tensor) -> Tensor:
        """[T, X] float32."""
        if self._settings.has_float32_routing:
            logits = F.linear(x.float(), self._weight.float())
        else:
            logits = F.linear(x, self._weight)
        if self._settings.scoring == "sigmoid":
            return logits.float().sigmoid()
        return torch.softmax(logits, dim=-1, dtype=torch.float32)

    def _outside_of_groups(self, choice: Tensor) -> Tensor:
        """[T, X] bool: experts that are not in one of a token's best groups."""
        settings = self._settings
        grouped = choice.view(len(choice), settings.num_groups, -1)
        of_group = grouped.topk(settings.num_best_of_group, dim=-1)[0].sum(dim=-1)
        best = of_group.topk(settings.num_chosen_groups, dim=-1)[1]
        outside = torch.ones_like(of_group, dtype=torch.bool).scatter_(1, best, False)
        return outside[:, :, None].expand(grouped.shape).reshape(choice.shape)

    def parameters(self) -> Iterator[Parameter]:
        """The routing matrix [X, E], then the bias [X] and the correction [X] where the model has them."""
        yield from self._parameters

    def pack(self) -> None:
        """Pack the product for the CPU kernels. Others are too small to be worth it."""
        if isinstance(self._ops, NativeOps):
            packed = self._ops.pack(PlainWeight(self._weight))
            if isinstance(packed, NativeWeight):
                self._native = NativeRouting(self._ops, self._settings, packed, self._bias, self._correction)
