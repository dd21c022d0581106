"""What torch says of the device and of itself: `python -m bench.gpu_check.machine_process`, asked before anything runs.

A device that is not there is found out here, in one sentence, before any group starts.
"""

from __future__ import annotations

from typing import Any

import torch

from bench.child import serve_parent
from bench.gpu_check.parts_process import Setup


class MachineInfo:
    """See `Worker`."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._device = Setup(spec["device"], is_quick=True).open()

    def do(self, command: str, arguments: dict[str, Any]) -> Any:
        """`describe`: names and numbers of the device."""
        if command != "describe":
            raise ValueError(f"unknown command {command}")
        found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda or "none"}
        if self._device.torch_device.type != "cuda":
            return {**found, "device": "cpu: speeds mean nothing", "num_gpus": 0}
        properties = torch.cuda.get_device_properties(self._device.torch_device)
        free, total = torch.cuda.mem_get_info(self._device.torch_device)
        return {
            **found,
            "device": properties.name,
            "num_gpus": torch.cuda.device_count(),
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(total / 2**30, 1),
            "free_gib": round(free / 2**30, 1),
            "l2_mib": round(properties.L2_cache_size / 2**20, 1),
        }

    def close(self) -> None:
        """See `Worker`."""
        self._device.close()


if __name__ == "__main__":
    serve_parent(MachineInfo)
