"""`python -m bench.gpu_check`: check and measure the whole GPU path on one GPU, in less than 8 minutes.

Prints one table; exits with 1 when a result is wrong or a check could not be finished, with 0 when speeds alone are
below their targets (`--strict`: with 1 for those too).
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence

from bench.arguments import parse_alone
from bench.facts import collect_facts
from bench.gpu_check.machine import PACKAGES, describe_device, read_clocks
from bench.gpu_check.plan import chosen_groups
from bench.gpu_check.rows import exit_status
from bench.gpu_check.run import GroupResult, GroupRun
from bench.gpu_check.settings import GpuCheckSettings
from bench.gpu_check.table import document, render
from bench.output_file import write_text
from wire.errors import BatonError

_DESCRIPTION = "Check and measure the GPU path of Baton on this machine."
_INTERRUPTED_STATUS = 130


def run(arguments: Sequence[str]) -> int:
    """`main` for a shell: an error is one line."""
    try:
        return main(arguments)
    except BatonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED_STATUS


def main(arguments: Sequence[str]) -> int:
    """Check, measure and print; the exit status. Raises `BatonError` when nothing could be begun."""
    settings = parse_alone("python -m bench.gpu_check", _DESCRIPTION, arguments, GpuCheckSettings)
    settings.check()
    groups = chosen_groups(settings.only, quick=settings.quick)
    device = describe_device(settings.device)
    facts = collect_facts(shlex.join(["python", "-m", "bench.gpu_check", *arguments]), PACKAGES)
    limits_s = sum(group.limit_s(quick=settings.quick) for group in groups)
    _say(f"{device['device']}: {len(groups)} groups, at most {limits_s:g} s")
    before = read_clocks()
    results: list[GroupResult] = []
    for group in groups:
        results.append(GroupRun(group, settings.device, quick=settings.quick).run(_say))
    rows = [row for result in results for row in result.rows]
    status = exit_status(rows, strict=settings.strict)
    print("\n".join([*facts.describe(), ", ".join(f"{name} {value}" for name, value in device.items()), ""]))
    print(render(results))
    if settings.json:
        content = document(facts, device, {"before": before, "after": read_clocks()}, results, status)
        write_text(settings.json, json.dumps(content, indent=1, allow_nan=False) + "\n")
    return status


def _say(text: str) -> None:
    print(f"checking: {text}", file=sys.stderr, flush=True)
