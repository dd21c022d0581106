"""Checksums of blocks: xxh3_64, computed where bytes are read and verified where they were written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash


def block_checksum(block: npt.NDArray[np.uint8]) -> int:
    """Checksum of one block's bytes, [block_bytes] uint8."""
    return xxhash.xxh3_64_intdigest(block.data)


def damaged_blocks(blocks: npt.NDArray[np.uint8], block_ids: Sequence[int], checksums: Sequence[int]) -> list[int]:
    """Those of `block_ids` whose bytes in `blocks` [num_blocks, block_bytes] do not match their checksum."""
    pairs = zip(block_ids, checksums, strict=True)
    return [block_id for block_id, checksum in pairs if block_checksum(blocks[block_id]) != checksum]
