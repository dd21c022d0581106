"""`python -m bench.gpu_check`: check and measure the whole GPU path on one GPU, in less than 8 minutes.

Prints one table; exits with 1 when a result is wrong or a check could not be finished, with 0 when speeds alone are
below their targets (`--strict`: with 1 for those too). Of the card nothing is ever set, only read.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.arguments import parse_alone
from bench.facts import collect_facts
from bench.gpu_check.rows import exit_status, render
from bench.gpu_check.run import MEASURE, GroupRun, chosen_groups, next_message
from bench.output_file import require_folder, write_text
from program.child import PIPE, Child
from program.settings import setting
from wire.errors import ChildFailed, InvalidSetting

_DESCRIPTION = "Check and measure the GPU path of Baton on this machine."
_PACKAGES = ("baton-serve", "torch", "triton", "transformers", "flashinfer-python", "nixl", "numpy", "pyzmq")
_START_S, _SMI_S = 60.0, 10.0
_CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem")
_SMI_FIELDS = ("name", "driver_version", *_CLOCKS, "power.limit", "temperature.gpu")


@dataclass(frozen=True, slots=True)
class GpuCheckSettings:
    """Settings of `python -m bench.gpu_check`."""

    only: str = setting("", "run only these groups, for example attention,graphs; empty: all")
    device: str = setting(
        "cuda", "what to check; cpu: the same code with tiny sizes, speeds mean nothing", choices=("cuda", "cpu")
    )
    quick: bool = setting(False, "fewer cases and rounds")
    strict: bool = setting(False, "exit with 1 for a missed target too")
    json: str = setting("", "file for the table, the machine and the versions")


def main(arguments: Sequence[str]) -> int:
    """Check, measure and print; the exit status. Raises `BatonError` when nothing could be begun."""
    settings = parse_alone("python -m bench.gpu_check", _DESCRIPTION, arguments, GpuCheckSettings)
    require_folder(settings.json)
    groups = chosen_groups(settings.only, quick=settings.quick)
    device = _describe_device(settings.device)
    facts = collect_facts(shlex.join(["python", "-m", "bench.gpu_check", *arguments]), _PACKAGES)
    _say(f"{device['device']}: {len(groups)} groups, at most {sum(group.limit_s for group in groups):g} s")
    before = _read_clocks()
    results = [GroupRun(group, settings.device, quick=settings.quick).run(_say) for group in groups]
    status = exit_status([row for result in results for row in result.rows], strict=settings.strict)
    print("\n".join([*facts.describe(), ", ".join(f"{name} {value}" for name, value in device.items()), ""]))
    print(render([(result.title, result.rows) for result in results]))
    if settings.json:
        content = {
            "facts": dataclasses.asdict(facts),
            "device": device,
            "clocks": {"before": before, "after": _read_clocks()},
            "status": status,
            "groups": [result.as_json() for result in results],
        }
        write_text(settings.json, json.dumps(content, indent=1, allow_nan=False) + "\n")
    return status


def _describe_device(device: str) -> dict[str, Any]:
    """What torch sees. Raises `InvalidSetting` when there is no such device."""
    with Child(MEASURE, "machine", device, "", "", stdout=PIPE) as child:
        try:
            found = next_message(child, _START_S)
        except ChildFailed as error:
            raise InvalidSetting(f"--device {device}: torch does not start: {error}") from None
    if "missing" in found:
        raise InvalidSetting(found["missing"])
    return found


def _read_clocks() -> list[dict[str, str]]:
    """What `nvidia-smi` says of each GPU now; [] where there is no such program."""
    query = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=_SMI_S).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [[value.strip() for value in line.split(",")] for line in answer.splitlines() if line.strip()]
    return [dict(zip(_SMI_FIELDS, values, strict=False)) for values in lines]


def _say(text: str) -> None:
    print(f"checking: {text}", file=sys.stderr, flush=True)
