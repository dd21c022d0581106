"""Formats in which the weight of a matrix product can lie in memory.

A format is a class of its own. One that checkpoints are published in says which of their tensors it is made of; one
that only a device's kernels read has nothing to load: `DecoderOps.pack` makes it of another, and the `linear` of the
same operations multiplies by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.models.parameters import Parameter


class LinearWeight(Protocol):
    """W [out, in] in some format."""

    def parameters(self) -> tuple[Parameter, ...]:
        """What loading fills; nothing for a format that is made of another."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PlainWeight:
    """`matrix`: [out, in] in the model's dtype. `loaded`: how it is loaded, nothing where it belongs to another part
    (a tied head)."""

    matrix: Tensor
    loaded: tuple[Parameter, ...] = ()

    def parameters(self) -> tuple[Parameter, ...]:
        """See `LinearWeight.parameters`."""
        return self.loaded


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """`blocked`: opaque, in the layout of oneDNN's kernels. Without it every product brings W into that layout first,
    which at decode sizes costs more than the product."""

    blocked: Tensor

    def parameters(self) -> tuple[Parameter, ...]:
        """See `LinearWeight.parameters`."""
        return ()
