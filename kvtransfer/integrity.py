"""Checksums of blocks: computed where bytes are read and verified where they were written.

Owns their names and which one a node uses. `xxh3` (xxh3_64) is the fastest for host memory; `dot64` is the one that a
GPU can compute without sending the block to the host, and that host memory can follow (see `dot64`). Both nodes of a
handoff must use the same, and say so in their handshake.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from wire.errors import InvalidSetting

AUTO = "auto"
XXH3 = "xxh3"
DOT64 = "dot64"
NONE = "none"
CHECKSUMS = (XXH3, DOT64, NONE)
"""What two nodes can agree on."""
CHOICES = (AUTO, *CHECKSUMS)
"""What `--kv-checksum` may be."""


def resolve(choice: str, *, in_device_memory: bool) -> str:
    """The checksum of a node whose pool lies there. Raises `InvalidSetting` for one that cannot be computed there."""
    if choice == AUTO:
        return DOT64 if in_device_memory else XXH3
    if choice == XXH3 and in_device_memory:
        raise InvalidSetting(
            "--kv-checksum xxh3 is computed by the CPU, and the KV of this node is in device memory: use dot64 or auto"
        )
    return choice


def block_checksum(block: npt.NDArray[np.uint8]) -> int:
    """xxh3 of one block's bytes, [block_bytes] uint8."""
    return xxhash.xxh3_64_intdigest(block.data)
