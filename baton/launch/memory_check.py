"""Whether the nodes of a deployment find room in this machine's memory.

Owns the question before anything is started: of the headers of the files alone. What is left for KV is each node's own
matter (`baton.engine.pool_size`).
"""

from __future__ import annotations

from pathlib import Path

from baton.device.host_memory import GIB, SMALLER, HostMemory
from baton.engine.models.checkpoint import choose_dtype
from baton.engine.models.facts import ModelFacts
from baton.engine.models.weight_files import read_header, weight_files
from baton.wire.errors import InvalidSetting, ModelLoadError
from baton.wire.layout import DTYPE_BYTES

PROCESS_BYTES = 160 * 2**20
"""What Python and the libraries of a node, or of a rank, take at least beside weights and KV."""


def require_memory_for_nodes(
    folder: Path, config: ModelFacts, dtype_setting: str, num_nodes: int, num_ranks: int, memory: HostMemory
) -> None:
    """Raise `InvalidSetting` when the nodes do not fit into the free memory: `num_nodes` copies of the weights, and the
    processes of `num_ranks` ranks in all.

    A system without memory ends processes, whichever. Files that are not there yet, or are wrong, are the nodes' to
    report.
    """
    try:
        headers = [read_header(path) for path in weight_files(folder)]
    except ModelLoadError:
        return
    num_elements = sum(entry.num_elements for header in headers for entry in header.values())
    num_bytes = num_elements * DTYPE_BYTES[choose_dtype(dtype_setting, config)]
    if num_nodes * num_bytes + num_ranks * PROCESS_BYTES > memory.free:
        raise InvalidSetting(
            f"{num_nodes} nodes need {num_bytes / GIB:.2f} GiB each for their weights and "
            f"{num_ranks * PROCESS_BYTES / GIB:.2f} GiB for their {num_ranks} processes, and {memory} on this machine; "
            f"try {SMALLER} (--prefill, --decode)"
        )
