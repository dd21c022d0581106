"""`python -m bench.gpu_check`: check and measure the whole GPU path on one GPU, in less than 8 minutes.

Prints one table; exits with 1 when a result is wrong or a check could not be finished, with 0 when speeds alone are
below their targets (`--strict`: with 1 for those too).
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from bench.arguments import parse_alone
from bench.facts import collect_facts
from bench.gpu_check.groups import chosen_groups
from bench.gpu_check.machine import describe_device, read_clocks
from bench.gpu_check.rows import exit_status
from bench.gpu_check.run import GroupRun
from bench.gpu_check.table import document, render
from bench.output_file import require_folder, write_text
from program.settings import setting

_DESCRIPTION = "Check and measure the GPU path of Baton on this machine."
_PACKAGES = ("baton-serve", "torch", "triton", "transformers", "flashinfer-python", "nixl", "numpy", "pyzmq")
_DEVICES = ("cuda", "cpu")


@dataclass(frozen=True, slots=True)
class GpuCheckSettings:
    """Settings of `python -m bench.gpu_check`."""

    only: str = setting("", "run only these groups, for example attention,graphs; empty: all")
    device: str = setting(
        "cuda", "what to check; cpu: the same code with tiny sizes, speeds mean nothing", choices=_DEVICES
    )
    quick: bool = setting(False, "fewer cases and rounds")
    strict: bool = setting(False, "exit with 1 for a missed target too")
    json: str = setting("", "file for the table, the machine and the versions")


def main(arguments: Sequence[str]) -> int:
    """Check, measure and print; the exit status. Raises `BatonError` when nothing could be begun."""
    settings = parse_alone("python -m bench.gpu_check", _DESCRIPTION, arguments, GpuCheckSettings)
    require_folder(settings.json)
    groups = chosen_groups(settings.only, quick=settings.quick)
    device = describe_device(settings.device)
    facts = collect_facts(shlex.join(["python", "-m", "bench.gpu_check", *arguments]), _PACKAGES)
    _say(f"{device['device']}: {len(groups)} groups, at most {sum(group.limit_s for group in groups):g} s")
    before = read_clocks()
    results = [GroupRun(group, settings.device, quick=settings.quick).run(_say) for group in groups]
    status = exit_status([row for result in results for row in result.rows], strict=settings.strict)
    print("\n".join([*facts.describe(), ", ".join(f"{name} {value}" for name, value in device.items()), ""]))
    print(render(results))
    if settings.json:
        content = document(facts, device, {"before": before, "after": read_clocks()}, results, status)
        write_text(settings.json, json.dumps(content, indent=1, allow_nan=False) + "\n")
    return status


def _say(text: str) -> None:
    print(f"checking: {text}", file=sys.stderr, flush=True)
