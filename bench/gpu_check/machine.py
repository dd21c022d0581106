"""What has to be said of the machine beside the table: the GPU, the driver, the clocks.

Reads only: nothing of the card is ever set. Knows no check.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

from bench.gpu_check.run import MEASURE
from program.child import PIPE, Child
from wire.errors import ChildFailed, InvalidSetting

_START_S, _SMI_S = 60.0, 10.0
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
    with Child(MEASURE, "machine", device, "", "", stdout=PIPE) as child:
        try:
            while not (line := child.read_line(_START_S)).startswith(b'{"'):
                continue
        except ChildFailed as error:
            raise InvalidSetting(f"--device {device}: torch does not start: {error}") from None
    found: dict[str, Any] = json.loads(line)
    if "missing" in found:
        raise InvalidSetting(found["missing"])
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
