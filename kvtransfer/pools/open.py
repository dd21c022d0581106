"""The pool over memory of any kind."""

from __future__ import annotations

from typing import Any

import numpy as np

from baton.kvtransfer.pools.base import KvPool
from baton.kvtransfer.pools.host import HostPool


def open_pool(blocks: Any) -> KvPool:
    """The pool over `blocks` [num_blocks, block_bytes] of bytes: a numpy array, or a torch tensor on a device."""
    if isinstance(blocks, np.ndarray):
        return HostPool(blocks)
    from baton.kvtransfer.pools.device import DevicePool

    return DevicePool(blocks)
