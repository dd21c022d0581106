"""The process of one measurement: `python -m bench.gpu_check.measure_process GROUP DEVICE "quick"|"" NAME`.

Says every row as it is measured as a line of JSON, {"row": ...}, and {"done": true} at the end. The group "machine"
says what torch sees instead. Owns nothing but the dispatch.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterable
from typing import Any

import torch

from bench.gpu_check.kernels_process import checksum_rows, operation_rows
from bench.gpu_check.relay_process import exposed_rows, transfer_rows
from bench.gpu_check.rows import Row, failed_row
from bench.gpu_check.setup_process import Setup
from bench.gpu_check.steps_rows_process import decode_rows, graph_rows, prefill_rows, throughput_rows
from wire.errors import InvalidSetting


def rows_of(group: str, name: str, setup: Setup) -> Iterable[Row]:
    """Measure `name` of a group. Raises `ValueError` for a group that nobody knows."""
    match group:
        case "operations":
            return operation_rows(setup)
        case "device":
            return checksum_rows(setup)
        case "graphs":
            return graph_rows(setup)
        case "transfer":
            return transfer_rows(setup, name)
        case "decode":
            return decode_rows(setup, name)
        case "prefill":
            return prefill_rows(setup, name)
        case "exposed":
            return exposed_rows(setup)
        case "throughput":
            return throughput_rows(setup, name)
        case _:
            raise ValueError(f"{group} measures nothing")


def machine(setup: Setup) -> dict[str, Any]:
    """Names and numbers of the device and of torch, or {"missing": why there is no such device}."""
    try:
        device = setup.open().torch_device
    except InvalidSetting as error:
        return {"missing": str(error)}
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda or "none"}
    if not setup.is_gpu:
        return {**found, "device": "cpu: speeds mean nothing", "num_gpus": 0}
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
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


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write("\n" + json.dumps(message) + "\n")
    sys.stdout.flush()


def main(group: str, device: str, quick: str, name: str) -> None:
    """See the module."""
    setup = Setup(device, quick == "quick")
    if group == "machine":
        _say(machine(setup))
        return
    try:
        for row in rows_of(group, name, setup):
            _say({"row": row.as_json()})
    except Exception as error:  # the rows before it stay
        traceback.print_exc()
        _say({"row": failed_row(group, name, f"{type(error).__name__}: {' '.join(str(error).split())}").as_json()})
    _say({"done": True})


if __name__ == "__main__":
    main(*sys.argv[1:])
    # no destructors: a library could wait for a device or a peer that has gone
    os._exit(0)
