"""Rotary position embedding: frequencies from the settings, cos and sin for the positions of one step.

Owns: the scaling variants (default, linear, dynamic, llama3, yarn) and the rotation itself, in the half-split layout
of GPT-NeoX: element i of a head is paired with element i + D/2. Knows no layers and no cache. Positions have no upper
bound and there is no table over all of them: the values of one step are computed once a step and shared by all layers.

Letters: T tokens, H heads, D head size.

Dynamic scaling changes nothing up to `max_position_embeddings`. Beyond it each position has the frequencies of a
sequence that ends there, as when it is generated: a key depends on its position alone, and can be found again.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

from engine.models.config import ModelConfig, RopeSettings

Rotation: TypeAlias = tuple[Tensor, Tensor]
"""cos and sine of a step's positions for all layers, each [T, 1, D], contiguous and in the model's dtype. The sine of
the first half of each row is negated."""


def inverse_frequencies(rope: RopeSettings, head_dim: int) -> tuple[Tensor, float]:
    """Angle per position of each pair, float32 [D/2], and the factor on cos and sin."""
    # A float32 power as in the reference implementations: float64 would differ from them in the last bits.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return frequencies / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3_frequencies(rope, frequencies), 1.0
    if rope.rope_type == "yarn":
        return _yarn_frequencies(rope, frequencies, head_dim), _yarn_attention_factor(rope)
    return frequencies, 1.0


class RotaryEmbedding:
    """cos and sin for any positions of one model on one device."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        frequencies, self._attention_factor = inverse_frequencies(config.rope, config.head_dim)
        # cos is even and sin is odd, to the last bit: the sign of the first half's sine comes with its angle.
        self._signed_frequencies = torch.cat((-frequencies, frequencies)).to(device)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotation of `positions` [T] int64 in `dtype`, computed in float32."""
        angles = positions[:, None, None] * self._frequencies_at(positions)
        cos, signed_sin = angles.cos(), angles.sin()
        if self._attention_factor != 1.0:
            cos.mul_(self._attention_factor)
            signed_sin.mul_(self._attention_factor)
        return cos.to(dtype), signed_sin.to(dtype)

    def _frequencies_at(self, positions: Tensor) -> Tensor:
        """What `positions` [T] are multiplied by: [D], or [T, 1, D] where it depends on them."""
        return self._signed_frequencies


class DynamicRotaryEmbedding(RotaryEmbedding):
    """The same with dynamic scaling."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__(config, device)
        size = config.head_dim
        self._rope, self._max_position = config.rope, config.max_position_embeddings
        self._theta_exponent = size / (size - 2)
        signs = torch.cat((torch.full((size // 2,), -1.0), torch.ones(size // 2)))
        exponents = (torch.arange(0, size, 2, dtype=torch.float32) / size).repeat(2)
        self._signs, self._exponents = signs.to(device), exponents.to(device)

    def _frequencies_at(self, positions: Tensor) -> Tensor:
        lengths = (positions[:, None, None] + 1).clamp(min=self._max_position)
        factor = self._rope.factor
        theta = self._rope.theta * (factor * lengths / self._max_position - (factor - 1)) ** self._theta_exponent
        return self._signs / theta**self._exponents


def make_rotary_embedding(config: ModelConfig, device: torch.device) -> RotaryEmbedding:
    """The rotation of `config`."""
    if config.rope.rope_type == "dynamic":
        return DynamicRotaryEmbedding(config, device)
    return RotaryEmbedding(config, device)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate all heads of x [T, H, D] by a `Rotation`. Returns a new contiguous tensor."""
    # Rolling by half a head brings each element's partner to its place; the partner's sign is already in the sine.
    partners = torch.roll(x, x.shape[-1] // 2, dims=-1)
    return partners.mul_(signed_sin).add_(x * cos)


def _llama3_frequencies(rope: RopeSettings, frequencies: Tensor) -> Tensor:
    """Long wavelengths divided by `factor`, short ones kept, a linear blend between (Llama 3.1)."""
    rotations_in_original = rope.original_max_position * frequencies / (2 * math.pi)
    kept = (rotations_in_original - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1.0 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn_frequencies(rope: RopeSettings, frequencies: Tensor, head_dim: int) -> Tensor:
    """Interpolated frequencies for slow pairs, kept ones for fast pairs, a ramp between
    (https://arxiv.org/abs/2309.00071)."""

    def pair_with_rotations(rotations: float) -> float:
        wavelength_ratio = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength_ratio) / (2 * math.log(rope.theta))

    first, last = pair_with_rotations(rope.beta_fast), pair_with_rotations(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # a step instead of a division by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0.0, 1.0)
    return frequencies / rope.factor * ramp + frequencies * (1.0 - ramp)


def _yarn_attention_factor(rope: RopeSettings) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1.0 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale is not None and rope.mscale_all_dim is not None:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
