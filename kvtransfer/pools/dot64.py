"""dot64: a checksum of a block that a GPU computes as fast as it reads, and a CPU computes to the same value.

Owns the definition and the version for host memory. The version for devices is in `device_checksums`.

    words    the block as signed 32-bit little-endian words w[0], w[1], ..., the last one padded with zero bytes
    total    sum of w[i] * a[i] modulo 2^64
    value    a bijective mix of total + num_bytes * GAMMA

The sum can be taken in any order and in parts, so blocks may be summed by layers. The weights a[i] are fixed numbers:
a[i] = 1 modulo 4, their lowest 33 bits differ for all i below 2^31 (they hold a permutation of i), and the bits above
are pseudo-random. Words of 32 bits under weights of 64 keep the highest bit of a word from being lost to the modulus.

What it always sees: a change of any one word; any two flipped bits; two words that changed places (if they differ);
a changed length. What it sees with high probability (it misses about one in 2^64, and one in 2^33 where nothing but
the highest bits of words change): everything else that goes wrong by accident, as cut, shifted or foreign data.
What it cannot see: changes that were made to cancel. It is linear and its weights are known: no protection against
somebody who means harm, just as xxh3 is none.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Weights: TypeAlias = npt.NDArray[np.int64]
WORD_BYTES = 4
_MASK = 2**64 - 1
_LOW_BITS = 31
_GAMMA = 0x9E3779B97F4A7C15
_SLAB_WORDS = 2**15


def weights(num_words: int) -> Weights:
    """The weights a[0] .. a[num_words - 1] of a block's words. Raises `ValueError` beyond 2^31."""
    if num_words > 2**_LOW_BITS:
        raise ValueError(f"a block of {num_words} words is too large for dot64")
    index = np.arange(num_words, dtype=np.uint64)
    high = _mixed(index * np.uint64(_GAMMA) + np.uint64(_GAMMA)) >> np.uint64(_LOW_BITS + 2)
    return (high << np.uint64(_LOW_BITS + 2) | _permuted(index) << np.uint64(2) | np.uint64(1)).view(np.int64)


def value(total: int, num_bytes: int) -> int:
    """The checksum of a block of `num_bytes` whose words add up to `total` (any representative modulo 2^64)."""
    return int(_mixed(np.array([(total + num_bytes * _GAMMA) & _MASK], dtype=np.uint64))[0])


class Dot64:
    """Computes totals of blocks of one size in host memory. Temporaries: `_SLAB_WORDS` products. `own`: the weights of
    its words where they are not the first ones, because the block is a part of another."""

    def __init__(self, block_bytes: int, own: Weights | None = None) -> None:
        self._block_bytes = block_bytes
        self._weights = weights(-(-block_bytes // WORD_BYTES)) if own is None else own
        self._products = np.empty(_SLAB_WORDS, dtype=np.int64)

    def total(self, part: npt.NDArray[np.uint8], begin_byte: int = 0) -> int:
        """The share of the total of the bytes from `begin_byte` on: [n] uint8, contiguous. Raises `ValueError` when
        they do not begin and end at words."""
        require_words(begin_byte, begin_byte + part.size, self._block_bytes)
        if part.size % WORD_BYTES:
            part = np.concatenate([part, np.zeros(-part.size % WORD_BYTES, dtype=np.uint8)])
        words = part.view("<i4")
        found = 0
        for first in range(0, words.size, _SLAB_WORDS):
            slab = words[first : first + _SLAB_WORDS]
            begin = begin_byte // WORD_BYTES + first
            products = self._products[: slab.size]
            np.multiply(slab, self._weights[begin : begin + slab.size], out=products)
            found += int(products.sum())
        return found & _MASK

    def checksum(self, block: npt.NDArray[np.uint8]) -> int:
        """The checksum of a whole block, [block_bytes] uint8."""
        return value(self.total(block), self._block_bytes)


def require_words(begin_byte: int, end_byte: int, block_bytes: int) -> None:
    """Raise `ValueError` unless the part `begin_byte` .. `end_byte` of a block consists of whole words."""
    if not 0 <= begin_byte <= end_byte <= block_bytes:
        raise ValueError(f"bytes {begin_byte} to {end_byte} of a block of {block_bytes}")
    if begin_byte % WORD_BYTES or (end_byte % WORD_BYTES and end_byte != block_bytes):
        raise ValueError(f"dot64 sums whole words of {WORD_BYTES} bytes, not {begin_byte} to {end_byte}")


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64: bijective, and each bit of the input changes half of the output."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)


def _permuted(index: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A permutation of the numbers below 2^31 that leaves no pattern: each line of it can be undone."""
    mask = np.uint64(2**_LOW_BITS - 1)
    index = index + np.uint64(0x2545F491) & mask
    index = index * np.uint64(0x5851F42D) & mask
    index = index ^ index >> np.uint64(15)
    index = index * np.uint64(0x4C957F2D) & mask
    index = index ^ index >> np.uint64(13)
    return index * np.uint64(0x6C078965) & mask
