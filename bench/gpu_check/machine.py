"""What has to be said of the machine beside the table: the GPU, the driver, the clocks, the versions.

Reads only: nothing of the card is ever set. Knows no check.
"""

from __future__ import annotations

import subprocess
from typing import Any

from bench.child import Child
from wire.errors import InvalidSetting, RequestFailed

PACKAGES = ("baton-serve", "torch", "triton", "transformers", "flashinfer-python", "nixl", "numpy", "pyzmq")
_PROCESS = "bench.gpu_check.machine_process"
_START_S = 60.0
_SMI_S = 10.0
_FIELDS = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.limit",
    "temperature.gpu",
)


def describe_device(device: str) -> dict[str, Any]:
    """What torch sees. Raises `InvalidSetting` when there is no such device."""
    with Child(_PROCESS, {"device": device}) as child:
        try:
            child.hear(_START_S)
            found: dict[str, Any] = child.ask("describe")
        except RequestFailed as error:
            raise InvalidSetting(str(error)) from None
    return found


def read_clocks() -> list[dict[str, str]]:
    """What `nvidia-smi` says of each GPU now; [] where there is no such program."""
    query = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=_SMI_S).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_clocks(answer)


def parse_clocks(answer: str) -> list[dict[str, str]]:
    """One dict for each line of comma-separated values."""
    lines = [[value.strip() for value in line.split(",")] for line in answer.splitlines() if line.strip()]
    return [dict(zip(_FIELDS, values, strict=False)) for values in lines]
