"""Attention without a cache, for tests of decoders."""

from __future__ import annotations

import torch
from torch import Tensor


class DenseAttention:
    """Causal attention within each sequence of a flattened batch, from its first token, fully materialized."""

    def __init__(self, lengths: list[int], windows: tuple[int | None, ...]) -> None:
        self._lengths = lengths
        self._windows = windows

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = (torch.split(tensor, self._lengths) for tensor in (q, k, v))
        return torch.cat([self._attend(self._windows[layer], *sequence) for sequence in zip(*parts, strict=True)])

    @staticmethod
    def _attend(window: int | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        repeats = q.shape[1] // k.shape[1]
        k, v = (tensor.repeat_interleave(repeats, dim=1).transpose(0, 1) for tensor in (k, v))
        scores = torch.matmul(q.transpose(0, 1), k.transpose(1, 2)) * q.shape[-1] ** -0.5
        index = torch.arange(len(q), device=q.device)
        distance = index[:, None] - index[None, :]
        hidden = (distance < 0) | (distance >= (window or len(q)))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1, dtype=torch.float32)
        return torch.matmul(weights.to(v.dtype), v).transpose(0, 1)
