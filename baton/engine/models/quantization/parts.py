"""Matrices that are stored in the parts of a `QuantizedWeight`: NAME.codes, NAME.scales and NAME.offsets.

Owns how a share of such a matrix is loaded. GGUF files are read as checkpoints of this kind.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from baton.engine.models.linear_weights import QuantizedWeight
from baton.engine.models.parameters import Parameter, Source
from baton.engine.models.quantization.base import Piece, Unquantized, Unread
from baton.engine.models.weight_files import TensorEntry
from baton.wire.errors import ModelLoadError

_CODES = {"I8": (torch.int8, 1), "U8": (torch.uint8, 2)}
"""By the dtype of the file: that of the tensor, and how many codes are in a byte."""


class QuantizedParts:
    """The method of checkpoints whose tensors are stored as parts of a `QuantizedWeight`. `entries` has their tensors
    by name."""

    name = ""
    is_published = True

    def __init__(self, entries: Mapping[str, TensorEntry]) -> None:
        self._entries = entries
        self.quantized = Unquantized().quantized
        self.held_bytes = Unquantized().held_bytes

    def unread(self, piece: Piece) -> Unread | None:
        """The parts to read of a matrix, or None where it is plain. Raises `ModelLoadError` where its scales are
        missing."""
        codes = self._entries.get(f"{piece.tensor}.codes")
        scales = self._entries.get(f"{piece.tensor}.scales")
        if codes is None:
            return None
        if scales is None:
            raise ModelLoadError(f"the checkpoint lacks {piece.tensor}.scales")
        return _UnreadParts(piece, codes, scales, f"{piece.tensor}.offsets" in self._entries)


class _UnreadParts:
    """The codes, scales and offsets of a matrix, to be read."""

    def __init__(self, piece: Piece, codes: TensorEntry, scales: TensorEntry, has_offsets: bool) -> None:
        num_in = piece.shape[1]
        self._piece = piece
        self._group_size = num_in // scales.shape[1]
        dtype, per_byte = _CODES[codes.dtype]
        columns = grouped(piece, self._group_size)
        self._codes = part(piece, "codes", dtype, divided(piece.columns, per_byte), num_in // per_byte)
        self._scales = part(piece, "scales", torch.float32, columns, scales.shape[1])
        self._offsets = part(piece, "offsets", torch.float32, columns, scales.shape[1]) if has_offsets else None

    def parameters(self) -> tuple[Parameter, ...]:
        """Codes, scales, and offsets if there are some."""
        found = (self._codes, self._scales, self._offsets)
        return tuple(parameter for parameter in found if parameter is not None)

    def loaded(self) -> QuantizedWeight:
        """The quantized weight, in the form in which it was stored."""
        offsets = None if self._offsets is None else self._offsets.tensor
        return QuantizedWeight(self._codes.tensor, self._scales.tensor, offsets, self._group_size, self._piece.dtype)


def divided(indices: range, by: int) -> range:
    """The indices of groups of so many, which `indices` is made of."""
    return range(indices.start // by, indices.stop // by)


def grouped(piece: Piece, group_size: int) -> range:
    """The groups of inputs that a share has. Raises `ModelLoadError` if it cuts through one."""
    if piece.columns.start % group_size or piece.columns.stop % group_size:
        raise ModelLoadError(
            f"{piece.tensor}: the share of a rank, inputs {piece.columns.start} to {piece.columns.stop - 1}, cuts "
            f"through groups of {group_size} that have a scale together"
        )
    return divided(piece.columns, group_size)


def part(piece: Piece, ending: str, dtype: torch.dtype, columns: range, num_columns: int) -> Parameter:
    """A tensor [out, num_columns] of the checkpoint, of which the piece's rows and some columns are loaded."""
    tensor = torch.empty((len(piece.rows), len(columns)), dtype=dtype, device=piece.device)
    regions = (range(len(piece.rows)), range(len(columns)))
    source = Source(f"{piece.tensor}.{ending}", (piece.shape[0], num_columns), (piece.rows, columns), regions)
    return Parameter(f"{piece.name}.{ending}", tensor, (source,))
