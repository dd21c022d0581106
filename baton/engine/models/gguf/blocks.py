"""The blocks of GGUF's quantized tensors, decoded to what `QuantizedWeight` is made of.

Owns what the bytes mean. Codes stay as they are in the file; scales and offsets of a group become one float32 number
each, which holds the product of the file's numbers exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Decoded:
    """Codes of some rows, with their scales and offsets.

    `codes`: [rows, in] int8, or [rows, in / 2] uint8 with two of 4 bits in a byte. `scales` and `offsets`: [rows, in /
    group].
    """

    codes: NDArray[np.int8] | Bytes
    scales: Floats
    offsets: Floats | None = None


@dataclass(frozen=True)
class BlockKind:
    """`decode`: of blocks [rows, blocks, bytes]."""

    decode: Callable[[Bytes], Decoded]
    bits: int
    group_size: int
    has_offsets: bool


def _halves(blocks: Bytes, first: int) -> Floats:
    """The float16 at byte `first` of each block: [rows, blocks]."""
    return np.ascontiguousarray(blocks[:, :, first : first + 2]).view(np.float16)[:, :, 0].astype(np.float32)


def _pairs(codes: Bytes) -> Bytes:
    """Two codes in a byte, the first in its lower half: [rows, in / 2] of [rows, ...]."""
    flat = codes.reshape(len(codes), -1)
    return (flat[:, ::2] | flat[:, 1::2] << 4).astype(np.uint8)


def _nibbles(packed: Bytes) -> Bytes:
    """All lower halves of the last dimension, then all upper halves."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _q8_0(blocks: Bytes) -> Decoded:
    codes = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8)
    return Decoded(codes.reshape(len(blocks), -1), _halves(blocks, 0))


def _q4_0(blocks: Bytes) -> Decoded:
    return Decoded(_pairs(_nibbles(blocks[:, :, 2:])), _halves(blocks, 0))


def _q4_1(blocks: Bytes) -> Decoded:
    scales = _halves(blocks, 0)
    # codes are 0 to 15 here, and those of a quantized weight -8 to 7
    return Decoded(_pairs(_nibbles(blocks[:, :, 4:])), scales, _halves(blocks, 2) + 8 * scales)


def _q4_k(blocks: Bytes) -> Decoded:
    packed = blocks[:, :, 4:16]
    low, high, upper = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    scales = np.concatenate((low & 63, (upper & 15) | (low >> 6) << 4), axis=-1)
    minima = np.concatenate((high & 63, (upper >> 4) | (high >> 6) << 4), axis=-1)
    # 64 codes in 32 bytes, four times
    codes = _nibbles(blocks[:, :, 16:].reshape(*blocks.shape[:2], 4, 32))
    scale = _halves(blocks, 0)[:, :, None] * scales
    offset = 8 * scale - _halves(blocks, 2)[:, :, None] * minima
    return Decoded(_pairs(codes), scale.reshape(len(blocks), -1), offset.reshape(len(blocks), -1))


def _q6_k(blocks: Bytes) -> Decoded:
    # twice 128 codes: four bits of each in 64 bytes, two more in 32
    low = _nibbles(blocks[:, :, :128].reshape(*blocks.shape[:2], 2, 64))
    high = blocks[:, :, 128:192].reshape(*blocks.shape[:2], 2, 32)
    upper = np.concatenate([(high >> shift) & 3 for shift in (0, 2, 4, 6)], axis=-1)
    codes = (low | upper << 4).astype(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[:, :, 192:208]).view(np.int8)
    scale = _halves(blocks, 208)[:, :, None] * scales
    return Decoded(codes.reshape(len(blocks), -1), scale.astype(np.float32).reshape(len(blocks), -1))


BLOCK_KINDS: Mapping[str, BlockKind] = {
    "Q8_0": BlockKind(_q8_0, 8, 32, has_offsets=False),
    "Q4_0": BlockKind(_q4_0, 4, 32, has_offsets=False),
    "Q4_1": BlockKind(_q4_1, 4, 32, has_offsets=True),
    "Q4_K": BlockKind(_q4_k, 4, 32, has_offsets=True),
    "Q6_K": BlockKind(_q6_k, 8, 16, has_offsets=False),
}
"""By the names of `TensorType`."""


def numbers_of(decoded: Decoded, group_size: int) -> Floats:
    """The numbers that the codes stand for, [rows, in]."""
    codes = decoded.codes
    if codes.dtype == np.uint8:
        codes = np.stack((codes & 15, codes >> 4), axis=-1).reshape(len(codes), -1).astype(np.int8) - np.int8(8)
    grouped = codes.reshape(len(codes), -1, group_size).astype(np.float32) * decoded.scales[:, :, None]
    if decoded.offsets is not None:
        grouped += decoded.offsets[:, :, None]
    return grouped.reshape(len(codes), -1)
