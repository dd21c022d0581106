"""Whether the nodes of a deployment find room for their weights in this machine's memory.

Owns the question before anything is started: of the headers of the files alone. What is left for KV is each node's own
matter (`engine.pool_size`).
"""

from __future__ import annotations

from pathlib import Path

from device.host_memory import GIB, SMALLER, HostMemory
from engine.models.checkpoint import choose_dtype
from engine.models.facts import ModelFacts
from engine.models.weight_files import read_header, weight_files
from wire.errors import InvalidSetting, ModelLoadError
from wire.layout import DTYPE_BYTES


def require_memory_for_weights(
    folder: Path, config: ModelFacts, dtype_setting: str, num_nodes: int, memory: HostMemory
) -> None:
    """Raise `InvalidSetting` when `num_nodes` copies of the weights do not fit into what is free. Files that are not
    there yet, or are wrong, are the nodes' to report."""
    try:
        headers = [read_header(path) for path in weight_files(folder)]
    except ModelLoadError:
        return
    num_elements = sum(entry.num_elements for header in headers for entry in header.values())
    num_bytes = num_elements * DTYPE_BYTES[choose_dtype(dtype_setting, config)]
    if num_nodes * num_bytes > memory.free:
        raise InvalidSetting(
            f"{num_nodes} nodes need {num_bytes / GIB:.2f} GiB each for their weights, and {memory} on this machine; "
            f"what helps is {SMALLER} (--prefill, --decode)"
        )
