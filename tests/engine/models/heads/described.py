"""An EAGLE-3 head, written down from its published description in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


class Described:
    """The head, written down from its description, over whole sequences and without a cache."""

    def __init__(self, tensors: dict[str, Tensor], embedding: Tensor, layer: str = "midlayer") -> None:
        self.tensors, self.embedding, self.layer = tensors, embedding, layer
        self.adds_to_normed = False

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.tensors[f"{name}.weight"]

    def matrix(self, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"].T

    def rotated(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angles = torch.arange(len(x))[:, None] / 10_000.0 ** (torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def states(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """Of one sequence from its first slot."""
        name, normed = self.layer, self.norm(hidden, f"{self.layer}.hidden_norm")
        embedded = self.norm(self.embedding[token_ids], f"{name}.input_layernorm")
        both = torch.cat((embedded, normed), dim=1)
        q, k, v = (
            (both @ self.matrix(f"{name}.self_attn.{each}_proj")).view(len(hidden), -1, 16) for each in ("q", "k", "v")
        )
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (self.rotated(k), v))
        scores = torch.einsum("qhd,khd->hqk", self.rotated(q), k) / 4.0
        later = torch.ones(len(hidden), len(hidden), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ self.matrix(f"{name}.self_attn.o_proj")
        stream = (normed if self.adds_to_normed else hidden) + attended
        x = self.norm(stream, f"{name}.post_attention_layernorm")
        gate = torch.nn.functional.silu(x @ self.matrix(f"{name}.mlp.gate_proj"))
        return stream + (gate * (x @ self.matrix(f"{name}.mlp.up_proj"))) @ self.matrix(f"{name}.mlp.down_proj")

    def logits(self, states: Tensor) -> Tensor:
        return self.norm(states, "norm") @ self.matrix("lm_head")
