"""What a step's tokens of images bring to a decoder."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SeenRows:
    """The embeddings of M tokens of images among the T tokens of a step, and rows to add behind the first K layers.

    `places`: [M] int64 among the tokens; `rows`: [1 + K, M, E]. `positions`: [T, D] int64, one for each element of a
    head, which is rotated by time, row or column; None where images have positions like text.
    """

    places: Tensor
    rows: Tensor
    positions: Tensor | None
