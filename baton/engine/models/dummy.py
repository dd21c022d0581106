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


def fill_with_noise(decoder: Decoder) -> None:
    """Set every parameter of `decoder`, then pack it."""
    generator = torch.Generator(decoder.device).manual_seed(_SEED)
    for part in decoder.parts():
        for parameter in part.parameters():
            _fill(parameter.tensor, parameter.center, generator)
        # at once, so that a quantized weight takes the memory of the plain one
        part.pack()


def _fill(tensor: Tensor, center: float, generator: torch.Generator) -> None:
    if tensor.is_floating_point():
        tensor.normal_(center, _DEVIATION, generator=generator)
    else:
        # small powers of two as scales, and any numbers they scale
        tensor.random_(_SCALES.start, _SCALES.stop, generator=generator)
