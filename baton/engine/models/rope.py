"""Rotary position embedding: frequencies from the settings, cos and sin for the positions of one step.

Owns: the scaling variants (default, linear, dynamic, llama3, yarn, longrope) and the rotation itself, in the half-split
layout of GPT-NeoX: element i of a head is paired with element i + D/2. Checkpoints that pair neighbours, or rotate a
part of each head, have their rows reordered at load (`head_order`), and what is not rotated has the frequency 0: all
models rotate in one way. Knows no layers and no cache. Positions have no upper
bound and there is no table over all of them: the values of one step are computed once a step and shared by all layers.

Letters: T tokens, H heads, D head size, R elements of a head that are rotated.

Dynamic scaling changes nothing up to `max_position_embeddings`. Beyond it each position has the frequencies of a
sequence that ends there, as when it is generated: a key depends on its position alone, and can be found again.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

from baton.engine.models.config import LayerRope, ModelConfig
from baton.engine.models.rope_settings import RopeSettings

Rotation: TypeAlias = tuple[Tensor, Tensor]
"""cos and sine of a step's positions for layers of one kind, each [T, 1, D], contiguous and in the model's dtype. The
sine of the first half of each row is negated."""


Rotations: TypeAlias = tuple[Rotation, ...]
"""Those of a step, for each kind that a model has (`ModelRotations`)."""


def inverse_frequencies(rope: RopeSettings, num_rotated: int, *, is_short: bool = False) -> tuple[Tensor, float]:
    """Angle per position of each pair, float32 [R/2], and the factor on cos and sin. `is_short`: longrope's factors are
    those for short sequences."""
    # A float32 power as in the reference implementations: float64 would differ from them in the last bits.
    exponents = torch.arange(0, num_rotated, 2, dtype=torch.float32) / max(num_rotated, 1)
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return frequencies / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3_frequencies(rope, frequencies), 1.0
    if rope.rope_type == "yarn":
        return _yarn_frequencies(rope, frequencies, num_rotated), _yarn_attention_factor(rope)
    if rope.rope_type == "longrope":
        factors = torch.tensor(rope.short_factors if is_short else rope.long_factors)
        return 1.0 / (factors * rope.theta**exponents), 1.0 if rope.attention_factor is None else rope.attention_factor
    return frequencies, 1.0


def head_order(config: ModelConfig) -> Tensor | None:
    """The order [D] in which the rows of a head of queries or keys stand after loading; None: as in the checkpoint."""
    size, rotated = config.head_dim, config.rotary_dim
    if rotated in (0, size) and not config.is_interleaved:
        return None
    elements = torch.arange(size)
    half, middle = rotated // 2, rotated + (size - rotated) // 2
    firsts, seconds = elements[:half], elements[half:rotated]
    if config.is_interleaved:
        firsts, seconds = elements[:rotated:2], elements[1:rotated:2]
    return torch.cat((firsts, elements[rotated:middle], seconds, elements[middle:]))


class RotaryEmbedding:
    """cos and sin for any positions of one model on one device. `kind`: which of its rotations."""

    def __init__(self, config: ModelConfig, device: torch.device, kind: LayerRope = "main") -> None:
        rope = config.local_rope if kind == "local" and config.local_rope is not None else config.rope
        num_rotated = 0 if kind == "none" else config.rotary_dim
        frequencies, factor = inverse_frequencies(rope, num_rotated, is_short=config.has_short_context)
        rest = torch.zeros(config.head_dim // 2 - num_rotated // 2)
        frequencies = torch.cat((frequencies, rest))
        # cos is even and sin is odd, to the last bit: the sign of the first half's sine comes with its angle.
        self._signed_frequencies = torch.cat((-frequencies, frequencies)).to(device)
        self._factors: Tensor | None = None
        if factor != 1.0 and num_rotated > 0:
            self._factors = (
                torch.cat((torch.full((num_rotated // 2,), factor), torch.ones(len(rest)))).repeat(2).to(device)
            )

    def tables(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotation of `positions` [T] int64 in `dtype`, computed in float32. [T, D]: where each element of a head
        has its own."""
        if positions.dim() == 2:
            angles = positions[:, None] * self._signed_frequencies
        else:
            angles = positions[:, None, None] * self._frequencies_at(positions)
        cos, signed_sin = angles.cos(), angles.sin()
        if self._factors is not None:
            cos.mul_(self._factors)
            signed_sin.mul_(self._factors)
        return cos.to(dtype), signed_sin.to(dtype)

    def _frequencies_at(self, positions: Tensor) -> Tensor:
        """What `positions` [T] are multiplied by: [D], or [T, 1, D] where it depends on them."""
        return self._signed_frequencies


class DynamicRotaryEmbedding(RotaryEmbedding):
    """A rotation with dynamic scaling: frequencies depend on the length of the sequence."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__(config, device)
        size = config.rotary_dim
        self._rope, self._max_position = config.rope, config.max_position_embeddings
        self._theta_exponent = size / (size - 2) if size > 2 else 1.0
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        rest = torch.zeros(config.head_dim // 2 - size // 2)
        self._exponents = torch.cat((exponents, rest)).repeat(2).to(device)
        self._signs = self._signed_frequencies.sign()

    def _frequencies_at(self, positions: Tensor) -> Tensor:
        lengths = (positions[:, None, None] + 1).clamp(min=self._max_position)
        factor = self._rope.factor
        theta = self._rope.theta * (factor * lengths / self._max_position - (factor - 1)) ** self._theta_exponent
        return self._signs / theta**self._exponents


def make_rotary_embedding(config: ModelConfig, device: torch.device, kind: LayerRope = "main") -> RotaryEmbedding:
    """The model's rotation of that kind."""
    if config.rope.rope_type == "dynamic" and kind == "main":
        return DynamicRotaryEmbedding(config, device)
    return RotaryEmbedding(config, device, kind)


class ModelRotations:
    """All rotations of a model: one for most, one more where layers with a window, or without rotation, have theirs."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        kinds = tuple(dict.fromkeys(config.layer_ropes))
        self.of_layer = tuple(kinds.index(kind) for kind in config.layer_ropes)
        """For each layer the number of its rotation among those of a step."""
        self._embeddings = [make_rotary_embedding(config, device, kind) for kind in kinds]

    def tables(self, positions: Tensor, dtype: torch.dtype) -> Rotations:
        """The rotations of `positions` [T] int64 in `dtype`."""
        return tuple(embedding.tables(positions, dtype) for embedding in self._embeddings)


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


def _yarn_frequencies(rope: RopeSettings, frequencies: Tensor, num_rotated: int) -> Tensor:
    """Interpolated frequencies for slow pairs, kept ones for fast pairs, a ramp between
    (https://arxiv.org/abs/2309.00071)."""

    def pair_with_rotations(rotations: float) -> float:
        wavelength_ratio = rope.original_max_position / (rotations * 2 * math.pi)
        return num_rotated * math.log(wavelength_ratio) / (2 * math.log(rope.theta))

    first, last = pair_with_rotations(rope.beta_fast), pair_with_rotations(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, num_rotated - 1)
    if first == last:
        last += 0.001  # a step instead of a division by zero
    ramp = ((torch.arange(num_rotated // 2, dtype=torch.float32) - first) / (last - first)).clamp(0.0, 1.0)
    return frequencies / rope.factor * ramp + frequencies * (1.0 - ramp)


def _yarn_attention_factor(rope: RopeSettings) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1.0 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale is not None and rope.mscale_all_dim is not None:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
