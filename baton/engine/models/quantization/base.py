"""The contract of methods of quantization: what a model's parts ask for when they allocate a weight, and when they have
loaded one.

A method knows which tensors of a checkpoint a weight is made of, and what they mean. It knows no parts and no kernels:
everything becomes the one vocabulary of `QuantizedWeight`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from baton.engine.models.linear_weights import LoadedWeight, QuantizedWeight
from baton.engine.models.parameters import Parameter


@dataclass(frozen=True, slots=True)
class Piece:
    """The share of a published matrix [shape], of which `rows` and `columns` are wanted. `name`: of the parameter;
    `tensor`: of the checkpoint's matrix, without its ending; `dtype`: of what it multiplies."""

    name: str
    tensor: str
    shape: tuple[int, int]
    rows: range
    columns: range
    dtype: torch.dtype
    device: torch.device


class Unread(Protocol):
    """A weight whose tensors are still to be loaded."""

    def parameters(self) -> tuple[Parameter, ...]:
        """The tensors that loading fills."""
        ...

    def loaded(self) -> LoadedWeight:
        """The weight, once they are filled. Raises `ModelLoadError` for what cannot be right in them."""
        ...


class Quantization(Protocol):
    """One method, as a model uses it. `name`: "" for none; nodes that exchange KV have the same one. `is_published`:
    the checkpoint is quantized, and `unread` finds weights in it."""

    name: str
    is_published: bool

    def unread(self, piece: Piece) -> Unread | None:
        """The weight as the checkpoint has it quantized; None for one that it has plain. Raises `ModelLoadError`."""
        ...

    def quantized(self, weight: LoadedWeight) -> LoadedWeight:
        """The form of a loaded weight in which it is packed."""
        ...

    def held_bytes(self, num_out: int, num_in: int) -> int:
        """The bytes in the end of a weight that is plain in the checkpoint; 0: as many as it takes there."""
        ...


class Unquantized:
    """No method: plain weights stay plain. See `Quantization`."""

    name = ""
    is_published = False

    def unread(self, piece: Piece) -> Unread | None:
        """None: every weight is plain."""
        return None

    def quantized(self, weight: LoadedWeight) -> LoadedWeight:
        """The weight as it was loaded."""
        return weight

    def held_bytes(self, num_out: int, num_in: int) -> int:
        """0: a weight takes as many bytes as in the checkpoint."""
        return 0


UNQUANTIZED = Unquantized()


def joined(pieces: list[LoadedWeight]) -> list[LoadedWeight]:
    """Weights of the same inputs, one below the other, those that are quantized alike in one."""
    found: list[LoadedWeight] = []
    for piece in pieces:
        if found and isinstance(piece, QuantizedWeight) and _are_alike(found[-1], piece):
            found[-1] = _below(found[-1], piece)
        else:
            found.append(piece)
    return found


def _are_alike(first: LoadedWeight, second: QuantizedWeight) -> bool:
    return (
        isinstance(first, QuantizedWeight)
        and (first.codes.dtype, first.group_size) == (second.codes.dtype, second.group_size)
        and (first.offsets is None) == (second.offsets is None)
        and first.input_order is None
        and second.input_order is None
    )


def _below(first: LoadedWeight, second: QuantizedWeight) -> QuantizedWeight:
    assert isinstance(first, QuantizedWeight)
    offsets = None
    if first.offsets is not None and second.offsets is not None:
        offsets = torch.cat((first.offsets, second.offsets))
    codes = torch.cat((_bytes(first.codes), _bytes(second.codes))).view(first.codes.dtype)
    return replace(first, codes=codes, scales=torch.cat((first.scales, second.scales)), offsets=offsets)


def _bytes(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


def reordered(pieces: list[LoadedWeight], order: Tensor) -> list[LoadedWeight]:
    """The pieces, one below the other, with their rows in another order, which keeps each row in its piece."""
    found: list[LoadedWeight] = []
    first = 0
    for piece in pieces:
        found.append(piece.reordered(order[first : first + piece.num_rows] - first))
        first += piece.num_rows
    return found
