"""Norm, where the model has one, and rotation of queries and keys.

Owns the variants: no norm or one of each head in the operations' own call; a norm of all heads of a token together; a
norm of each head whose weight is an offset from 1.

Letters: T tokens of the step, H heads of queries and keys, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.models.collectives import Collectives
from baton.engine.models.config import ModelConfig
from baton.engine.models.parameters import Parameter, Source, whole
from baton.engine.models.parts.base import Part, PartSetup
from baton.engine.models.parts.norm import OFFSET, HeadRotation, OffsetWeight
from baton.engine.models.rope import Rotation, head_order
from baton.engine.models.shard import scaled


class HeadPart(Part, Protocol):
    """The norm, if there is one, and the rotation of queries and keys before attention."""

    def __call__(self, x: Tensor, rotation: Rotation) -> Tensor:
        """The normed and rotated heads of queries and keys: [T, H, D] of x [T, H, D]."""
        ...


def make_head_rotation(
    name: str, tensors: str, config: ModelConfig, num_heads: int, num_kv_heads: int, setup: PartSetup
) -> HeadPart:
    """The part for a layer whose tensors begin with `tensors`."""
    names = config.names
    norms = {f"{tensors}.{names.q_norm}.weight": num_heads, f"{tensors}.{names.k_norm}.weight": num_kv_heads}
    if config.qk_norm == "whole":
        return WholeHeadNorm(name, tuple(norms), config, setup)
    if config.qk_norm == "heads" and config.norm == OFFSET:
        return OffsetHeadNorm(name, norms, config, setup, head_order(config))
    named = norms if config.qk_norm == "heads" else {}
    return HeadRotation(name, named, config.head_dim, config.rms_norm_eps, setup, head_order(config))


class WholeHeadNorm:
    """RMS norms over all query heads of a token, and over all its key heads: those of all ranks together. See
    `HeadPart`."""

    def __init__(self, name: str, tensors: tuple[str, ...], config: ModelConfig, setup: PartSetup) -> None:
        """`tensors`: of the weights of queries [Hq * D] and keys [Hkv * D]."""
        self._eps = config.rms_norm_eps
        self._ops, self._collectives, self._num_ranks = setup.ops, setup.collectives, setup.shard.size
        heads = setup.shard.share_of(config.num_heads, "attention heads")
        shares = (heads, setup.shard.kv_heads_of(config.num_kv_heads))
        self._num_heads = len(heads)
        self._weights = [setup.empty(len(share) * config.head_dim) for share in shares]
        counts = (config.num_heads, config.num_kv_heads)
        self._parameters = [
            _weight(f"{name}.{part}", tensor, weight, count * config.head_dim, scaled(share, config.head_dim))
            for part, tensor, weight, count, share in zip("qk", tensors, self._weights, counts, shares, strict=True)
        ]

    def __call__(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Norm all query heads of a token together, and all key heads, then rotate x [T, H, D]."""
        both = x[:, : self._num_heads].flatten(1), x[:, self._num_heads :].flatten(1)
        if self._collectives is not None:
            normed = self._normed_together(both, self._collectives)
        else:
            normed = [
                self._ops.add_norm(part, None, weight, self._eps)
                for part, weight in zip(both, self._weights, strict=True)
            ]
        return self._ops.norm_rotate(torch.cat(normed, dim=1).view(x.shape), None, self._eps, rotation)

    def _normed_together(self, both: Sequence[Tensor], collectives: Collectives) -> list[Tensor]:
        """As `DecoderOps.add_norm`, with the mean over the shares of all ranks. Heads that several ranks have count as
        often, in the sum and in the number."""
        squares = collectives.add_up(torch.stack([part.float().square().sum(1) for part in both], dim=1))
        normed = []
        for number, (part, weight) in enumerate(zip(both, self._weights, strict=True)):
            mean = squares[:, number, None] / (self._num_ranks * part.shape[1])
            normed.append((part.float() * torch.rsqrt(mean + self._eps)).to(part.dtype) * weight)
        return normed

    def parameters(self) -> Iterator[Parameter]:
        """The weights of queries and of keys."""
        yield from self._parameters

    def pack(self) -> None:
        """Do nothing: norms have one format."""


def _weight(name: str, tensor: str, weight: Tensor, size: int, taken: range) -> Parameter:
    return Parameter(name, weight, (Source(tensor, (size,), (taken,), whole((len(taken),))),), center=1.0)


class OffsetHeadNorm:
    """The norm of each head, times 1 + weight in float32. See `HeadPart`."""

    def __init__(
        self, name: str, norms: dict[str, int], config: ModelConfig, setup: PartSetup, order: Tensor | None
    ) -> None:
        """`norms`, `order`: as for `HeadRotation`."""
        self._order = order
        self._eps = config.rms_norm_eps
        self._ops = setup.ops
        self._weights = [
            OffsetWeight(f"{name}.{part}", tensor, config.head_dim, setup)
            for part, tensor in zip("qk", norms, strict=True)
        ]
        self._counts = tuple(norms.values())
        self._factors: Tensor | None = None

    def __call__(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Norm each head of x [T, H, D] with a weight that is an offset from 1, then rotate it."""
        assert self._factors is not None  # packed
        normed = F.rms_norm(x.float(), x.shape[-1:], None, self._eps).mul_(self._factors).to(x.dtype)
        return self._ops.norm_rotate(normed, None, self._eps, rotation)

    def parameters(self) -> Iterator[Parameter]:
        """The weights of queries and of keys."""
        for weight in self._weights:
            yield weight.parameter

    def pack(self) -> None:
        """Make one row [D] of factors for each head, in the order in which heads lie in memory."""
        rows = [weight.factors().expand(count, -1) for weight, count in zip(self._weights, self._counts, strict=True)]
        factors = torch.cat(rows)
        self._factors = factors if self._order is None else factors[:, self._order.to(factors.device)].contiguous()
