"""Taps: what is kept of the residual stream between the layers of a model, for a head that reads it.

Owns which layers have one. What is kept is that of the last pass, of all its tokens.

Letters: T tokens of the step, S hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Taps(Protocol):
    """Whoever reads the stream of a pass between its layers."""

    def pass_by(self, number: int, residual: Tensor, delta: Tensor | None) -> None:
        """The stream in front of layer `number`, or behind the last: `residual` [T, S], to which `delta` is still to be
        added. Both must not be changed."""
        ...


class KeptStreams:
    """Taps in front of `layers`."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = layers
        self._kept: dict[int, Tensor] = {}

    @property
    def streams(self) -> list[Tensor]:
        """Of the last pass, for each of the layers [T, S]."""
        return [self._kept[layer] for layer in self.layers]

    def pass_by(self, number: int, residual: Tensor, delta: Tensor | None) -> None:
        """Keep a copy, where there is a tap."""
        if number in self.layers:
            self._kept[number] = residual.clone() if delta is None else residual + delta
