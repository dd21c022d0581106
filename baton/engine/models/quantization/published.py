"""Checkpoints of GPTQ, AWQ, compressed-tensors and FP8, as they are published.

Owns which tensors a matrix [out, in] is made of, and what their numbers mean. Which matrices are quantized is what the
files have: a matrix that they have in its plain dtype stays plain, whatever the config lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from baton.engine.models.linear_weights import QuantizedWeight
from baton.engine.models.parameters import Parameter, Source
from baton.engine.models.quantization.base import Piece, Unquantized, Unread
from baton.engine.models.quantization.parts import divided, grouped
from baton.engine.models.quantization_settings import AWQ, GPTQ, PublishedQuantization
from baton.engine.models.weight_files import TensorEntry
from baton.wire.errors import ModelLoadError

_DTYPES = {"I32": torch.int32, "I64": torch.int64, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn}
_CODE_DTYPES = ("I8", "F8_E4M3")
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the eight outputs of a word lie in it."""
Tensors: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True)
class _UnreadTensors:
    """Tensors to be read, by the ending of their names, and `convert`, which makes the weight of them."""

    read: Mapping[str, Parameter]
    convert: Callable[[Tensors], QuantizedWeight]

    def parameters(self) -> tuple[Parameter, ...]:
        """All tensors to be read."""
        return tuple(self.read.values())

    def loaded(self) -> QuantizedWeight:
        """The quantized weight that `convert` makes of the tensors."""
        return self.convert({ending: parameter.tensor for ending, parameter in self.read.items()})


class Published:
    """The methods of published checkpoints. `entries` has the checkpoint's tensors by name."""

    name = ""
    is_published = True

    def __init__(self, settings: PublishedQuantization, entries: Mapping[str, TensorEntry]) -> None:
        self._settings = settings
        self._entries = entries
        self.quantized = Unquantized().quantized
        self.held_bytes = Unquantized().held_bytes

    def unread(self, piece: Piece) -> Unread | None:
        """The tensors to read of a matrix, or None where it is plain. The tensors of the files decide that, not the
        config."""
        tensors = _PieceTensors(piece, self._entries)
        if tensors.has("qweight") and self._settings.method in (GPTQ, AWQ):
            return _gptq(tensors, self._settings)
        if tensors.has("weight_packed"):
            return _packed(tensors, self._settings)
        if tensors.dtype("weight") in _CODE_DTYPES:
            return _codes(tensors, self._settings)
        return None


def is_code(name: str, dtype: str) -> bool:
    """Whether a tensor, of which the file says this, is a quantized matrix or part of one."""
    return name.endswith((".qweight", ".weight_packed")) or dtype in _CODE_DTYPES


class _PieceTensors:
    """The tensors of one matrix, of which a share is read."""

    def __init__(self, piece: Piece, entries: Mapping[str, TensorEntry]) -> None:
        self.piece = piece
        self._entries = entries
        self.num_out, self.num_in = piece.shape

    def has(self, ending: str) -> bool:
        return f"{self.piece.tensor}.{ending}" in self._entries

    def dtype(self, ending: str) -> str:
        return self.entry(ending).dtype if self.has(ending) else ""

    def entry(self, ending: str) -> TensorEntry:
        found = self._entries.get(f"{self.piece.tensor}.{ending}")
        if found is None:
            raise ModelLoadError(f"the checkpoint lacks {self.piece.tensor}.{ending}")
        return found

    def read(self, ending: str, shape: Sequence[int], taken: Sequence[range]) -> Parameter:
        """The share `taken` of a tensor, which must have this shape."""
        found = self.entry(ending).dtype
        # of another dtype than this they are refused, as any tensor is
        dtype = torch.float32 if "scale" in ending else _DTYPES.get(found, torch.int32)
        tensor = torch.empty(tuple(map(len, taken)), dtype=dtype, device=self.piece.device)
        region = tuple(range(len(indices)) for indices in taken)
        source = Source(f"{self.piece.tensor}.{ending}", tuple(shape), tuple(taken), region)
        return Parameter(f"{self.piece.name}.{ending}", tensor, (source,))

    def read_all(self, ending: str) -> Parameter:
        """All of a tensor, whatever its shape."""
        shape = self.entry(ending).shape
        return self.read(ending, shape, [range(size) for size in shape])

    def group_size(self, size: int) -> int:
        """`size`, 0 for all inputs. Raises `ModelLoadError` if it does not divide them."""
        if size and self.num_in % size:
            raise ModelLoadError(f"{self.piece.tensor}: groups of {size} do not divide its {self.num_in} inputs")
        return size or self.num_in

    def words(self, indices: range, size: int, per_word: int) -> range:
        """The words that have the numbers of `indices`, so many in each. Raises `ModelLoadError`."""
        if size % per_word or indices.start % per_word or indices.stop % per_word:
            raise ModelLoadError(
                f"{self.piece.tensor}: {indices.start} to {indices.stop - 1} of {size} are no whole words of {per_word}"
            )
        return divided(indices, per_word)


def _gptq(tensors: _PieceTensors, settings: PublishedQuantization) -> Unread:
    """GPTQ and AWQ: words of several codes along the inputs, or the outputs, and zero points along the outputs."""
    piece, per_word = tensors.piece, 32 // settings.bits
    group_size = tensors.group_size(settings.group_size)
    groups, num_groups = grouped(piece, group_size), tensors.num_in // group_size
    out_words = tensors.words(piece.rows, tensors.num_out, per_word)
    in_words = tensors.words(piece.columns, tensors.num_in, per_word)
    shape, taken = (tensors.num_in // per_word, tensors.num_out), (in_words, piece.rows)
    if settings.method == AWQ:
        shape, taken = (tensors.num_in, tensors.num_out // per_word), (piece.columns, out_words)
    read = {
        "qweight": tensors.read("qweight", shape, taken),
        "qzeros": tensors.read("qzeros", (num_groups, tensors.num_out // per_word), (groups, out_words)),
        "scales": tensors.read("scales", (num_groups, tensors.num_out), (groups, piece.rows)),
    }
    if tensors.has("g_idx"):
        read["g_idx"] = tensors.read("g_idx", (tensors.num_in,), (piece.columns,))

    def convert(loaded: Tensors) -> QuantizedWeight:
        zeros = unpacked(loaded["qzeros"], settings.bits, 1)
        codes = unpacked(loaded["qweight"], settings.bits, 1 if settings.method == AWQ else 0)
        if settings.method == AWQ:
            codes, zeros = _in_order(codes), _in_order(zeros)
        if settings.is_zero_stored_less_one:
            zeros = (zeros + 1) & (2**settings.bits - 1) if settings.bits < 8 else zeros.to(torch.int16) + 1
        order = _input_order(piece, loaded.get("g_idx"), group_size)
        codes = codes.T if order is None else codes.T[:, order]
        return quantized(codes, loaded["scales"].T, zeros.T, settings.bits, group_size, piece.dtype, order)

    return _UnreadTensors(read, convert)


def _packed(tensors: _PieceTensors, settings: PublishedQuantization) -> Unread:
    """compressed-tensors: words of several codes along the inputs."""
    piece, per_word = tensors.piece, 32 // settings.bits
    group_size = tensors.group_size(settings.group_size)
    groups, num_groups = grouped(piece, group_size), tensors.num_in // group_size
    in_words = tensors.words(piece.columns, tensors.num_in, per_word)
    read = {
        "weight_packed": tensors.read(
            "weight_packed", (tensors.num_out, tensors.num_in // per_word), (piece.rows, in_words)
        ),
        "weight_scale": tensors.read("weight_scale", (tensors.num_out, num_groups), (piece.rows, groups)),
        "weight_shape": tensors.read_all("weight_shape"),
    }
    if tensors.has("weight_zero_point"):
        out_words = tensors.words(piece.rows, tensors.num_out, per_word)
        shape = (tensors.num_out // per_word, num_groups)
        read["weight_zero_point"] = tensors.read("weight_zero_point", shape, (out_words, groups))
    if tensors.has("weight_g_idx"):
        read["weight_g_idx"] = tensors.read("weight_g_idx", (tensors.num_in,), (piece.columns,))

    def convert(loaded: Tensors) -> QuantizedWeight:
        if tuple(loaded["weight_shape"].tolist()) != piece.shape:
            raise ModelLoadError(f"{piece.tensor}.weight_shape is {loaded['weight_shape'].tolist()}, not {piece.shape}")
        codes = unpacked(loaded["weight_packed"], settings.bits, 1)
        zeros = None
        if "weight_zero_point" in loaded:
            zeros = unpacked(loaded["weight_zero_point"], settings.bits, 0)
        order = _input_order(piece, loaded.get("weight_g_idx"), group_size)
        codes = codes if order is None else codes[:, order]
        return quantized(codes, loaded["weight_scale"], zeros, settings.bits, group_size, piece.dtype, order)

    return _UnreadTensors(read, convert)


def _codes(tensors: _PieceTensors, settings: PublishedQuantization) -> Unread:
    """One number of 8 bits for each weight: int8, or FP8 with a scale of the tensor, of outputs, groups or blocks."""
    piece = tensors.piece
    scale = "weight_scale_inv" if tensors.has("weight_scale_inv") else "weight_scale"
    read = {"weight": tensors.read("weight", piece.shape, (piece.rows, piece.columns)), scale: tensors.read_all(scale)}
    if tensors.has("weight_zero_point"):
        raise ModelLoadError(f"{piece.tensor}.weight_zero_point: zero points of 8 bits are not supported")
    if tensors.has("input_scale"):
        read["input_scale"] = tensors.read_all("input_scale")  # of activations, which are not rounded
    block = settings.block or (1, settings.group_size or tensors.num_in)
    # a block may end before its size, or go beyond a rank's share: groups of the common divisor have its scale as well
    group_size = math.gcd(block[1], tensors.num_in, piece.columns.start, piece.columns.stop)
    groups = grouped(piece, group_size)

    def convert(loaded: Tensors) -> QuantizedWeight:
        scales = loaded[scale].to(torch.float32)
        expected = tuple(-(-size // unit) for size, unit in zip(piece.shape, block, strict=True))
        if scales.numel() == 1:
            scales = scales.reshape(1, 1).expand(expected)
        if scales.dim() == 1:
            scales = scales[:, None]
        if tuple(scales.shape) != expected:
            raise ModelLoadError(
                f"{piece.tensor}.{scale} has shape {list(scales.shape)}, the config makes it {list(expected)}"
            )
        by_input = scales.repeat_interleave(block[1] // group_size, 1)[:, groups.start : groups.stop]
        by_output = by_input.repeat_interleave(block[0], 0)[piece.rows.start : piece.rows.stop]
        return QuantizedWeight(loaded["weight"], by_output.contiguous(), None, group_size, piece.dtype)

    return _UnreadTensors(read, convert)


def unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """uint8 numbers of int32 words, the lowest bits first, side by side along `dim`."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    shape = [1] * (words.dim() + 1)
    shape[dim + 1] = len(shifts)
    numbers = (words.unsqueeze(dim + 1) >> shifts.view(shape)) & (2**bits - 1)
    flat: Tensor = numbers.to(torch.uint8).flatten(dim, dim + 1)
    return flat


def _in_order(numbers: Tensor) -> Tensor:
    """The outputs of AWQ's words in their own order."""
    eights = numbers.view(len(numbers), -1, 8)
    in_order: Tensor = eights[:, :, list(_AWQ_ORDER)].flatten(1)
    return in_order


def quantized(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    input_order: Tensor | None,
) -> QuantizedWeight:
    """scales * (codes - zeros) of unsigned `codes` [out, in]. `zeros` None: the middle one."""
    middle = 2 ** (bits - 1)
    scales = scales.to(torch.float32).contiguous()
    offsets = None
    if zeros is not None and not bool((zeros == middle).all()):
        offsets = scales * (middle - zeros.to(torch.float32))
    kept = codes[:, ::2] | codes[:, 1::2] << 4 if bits == 4 else (codes ^ 0x80).view(torch.int8)
    return QuantizedWeight(kept.contiguous(), scales, offsets, group_size, dtype, input_order)


def _input_order(piece: Piece, group_of: Tensor | None, group_size: int) -> Tensor | None:
    """The order in which inputs of a group are neighbours, None if they are. Raises `ModelLoadError` for groups of
    other sizes, and for a rank's share of inputs in which a group is not whole."""
    if group_of is None or bool((group_of == -1).all()):
        return None
    order = group_of.argsort(stable=True)
    expected = torch.arange(piece.columns.start, piece.columns.stop, device=group_of.device) // group_size
    if not torch.equal(group_of[order].to(expected.dtype), expected):
        raise ModelLoadError(f"{piece.tensor}: its g_idx does not give {group_size} inputs of this rank to each group")
    return None if torch.equal(order, torch.arange(len(order), device=order.device)) else order
