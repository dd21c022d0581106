"""The kinds of block checksums: they are computed where blocks are read, and verified where blocks were written.

Owns the names of the kinds and the choice for a node. `xxh3` (xxh3_64) is the fastest in host memory; `dot64` can be
computed by a GPU without copying the block to the host, and also by a CPU (see `dot64`). Both nodes of a handoff must
use the same kind, which their handshake verifies.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from baton.wire.errors import InvalidSetting

AUTO = "auto"
XXH3 = "xxh3"
DOT64 = "dot64"
NONE = "none"
CHECKSUMS = (XXH3, DOT64, NONE)
"""The kinds that two nodes can agree on."""
CHOICES = (AUTO, *CHECKSUMS)
"""The values of `--kv-checksum`."""


def resolve(choice: str, *, in_device_memory: bool, in_rank_pools: bool = False) -> str:
    """The checksum kind of a node, by where its pool is. `in_rank_pools`: nodes of its deployment may have divided it
    among their ranks, which add up what they have. Raises `InvalidSetting` if it cannot be computed there."""
    if choice == AUTO:
        return DOT64 if in_device_memory or in_rank_pools else XXH3
    if choice == XXH3 and in_rank_pools:
        raise InvalidSetting(
            "--kv-checksum xxh3 is of whole blocks, and --rank-pools own no rank has a whole block to hash: use dot64"
        )
    if choice == XXH3 and in_device_memory:
        raise InvalidSetting(
            "--kv-checksum xxh3 is computed by the CPU, and the KV of this node is in device memory: use dot64 or auto"
        )
    return choice


def block_checksum(block: npt.NDArray[np.uint8]) -> int:
    """xxh3 of one block's bytes, [block_bytes] uint8."""
    return xxhash.xxh3_64_intdigest(block.data)
