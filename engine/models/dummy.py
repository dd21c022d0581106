"""Random weights in place of a checkpoint's, for measurements of speed: `--load-format dummy`.

Owns the values: norms near 1, everything else near 0, small enough that activations stay finite through any number of
layers, and never zero, since zeros make products on a GPU look faster than they are. The same on every node of one kind
of device.
"""

from __future__ import annotations

import torch

from engine.models.decoder import Decoder

_SEED = 0
_DEVIATION = 0.02
_SCALES = range(117, 121)


def fill_with_noise(decoder: Decoder) -> None:
    """Set every parameter of `decoder`, then pack it."""
    generator = torch.Generator(decoder.device).manual_seed(_SEED)
    for parameter in decoder.parameters():
        if parameter.tensor.is_floating_point():
            parameter.tensor.normal_(parameter.center, _DEVIATION, generator=generator)
        else:
            # small powers of two as scales, and any numbers they scale
            parameter.tensor.random_(_SCALES.start, _SCALES.stop, generator=generator)
    decoder.pack()
