"""Checksums of blocks: xxh3_64, computed where bytes are read and verified where they were written."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

XXH3 = "xxh3"
NONE = "none"
CHECKSUMS = (XXH3, NONE)
"""Choices of both sides; they must agree."""


def block_checksum(block: npt.NDArray[np.uint8]) -> int:
    """Checksum of one block's bytes, [block_bytes] uint8."""
    return xxhash.xxh3_64_intdigest(block.data)
