"""Random weights in place of a checkpoint's, for measurements of speed: `--load-format dummy`.

Owns the values: norms near 1, everything else near 0, small enough that activations stay finite through any number of
layers, and never zero, since zeros make products on a GPU look faster than they are. The same on every node of one kind
of device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.models.decoder import Decoder

_SEED = 0
_DEVIATION = 0.02
_SCALES = range(117, 121)
_NUM_RANDOM = 1_048_573
"""Numbers that are drawn for a tensor; a larger one repeats them. Prime, so that no two rows are alike."""


def fill_with_noise(decoder: Decoder) -> None:
    """Set every parameter of `decoder`, then pack it."""
    for parameter in decoder.parameters():
        parameter.take_memory_back()
    generator = torch.Generator(decoder.device).manual_seed(_SEED)
    for part in decoder.parts():
        for parameter in part.parameters():
            parameter.allocate()
            _fill(parameter.tensor, parameter.center, generator)
        # at once, so that a quantized weight takes the memory of the plain one
        part.pack()


def _fill(tensor: Tensor, center: float, generator: torch.Generator) -> None:
    noise = tensor.new_empty(min(tensor.numel(), _NUM_RANDOM))
    if tensor.is_floating_point():
        noise.normal_(center, _DEVIATION, generator=generator)
    else:
        # small powers of two as scales, and any numbers they scale
        noise.random_(_SCALES.start, _SCALES.stop, generator=generator)
    _repeat(noise, tensor.view(-1))


def _repeat(noise: Tensor, flat: Tensor) -> None:
    """Fill `flat` with `noise`, again and again."""
    whole = len(flat) // max(len(noise), 1) * len(noise)
    flat[:whole].view(-1, max(len(noise), 1)).copy_(noise)
    flat[whole:].copy_(noise[: len(flat) - whole])
