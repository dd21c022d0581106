"""Times of prompts and decode steps of several engines, in turns: `python -m baton.bench.limits.step_turns TARGET ...`.

A target is `NAME=COMMAND`. Its command gets `--threads`, `--prompts` and `--steps` appended, measures each prompt
length and each BATCHxCONTEXT that they name, and prints a line of JSON for each: {"case": "8x512", "seconds": 0.11}.
Baton's is `python -m baton.bench.limits.baton_steps_process MODEL`; beside it lie those of OpenVINO, vLLM and
llama.cpp, for a Python that has them. All run on the same cores, one after another, `--rounds` times. Printed are the
medians, and each one's over the first target's: above 1 the first is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

from baton.bench.numbers import number, paired_ratio
from baton.wire.errors import InvalidSetting, RequestFailed

_LONGEST_S = 1800.0
_DEFAULT_STEPS = "1x512,8x512,16x512,32x512,1x4096"
Times = Mapping[str, Sequence[float]]
"""Seconds of each case, one for each round."""


def measure(command: Sequence[str], cores: set[int]) -> dict[str, float]:
    """Run a target's command: seconds by case. Raises `RequestFailed`."""
    try:
        ran = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            timeout=_LONGEST_S,
            check=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RequestFailed(f"{command[0]}: {error}") from None
    lines = [line for line in ran.stdout.decode(errors="replace").splitlines() if line.startswith("{")]
    return {found["case"]: float(found["seconds"]) for found in map(json.loads, lines)}


def table(found: Mapping[str, Times]) -> str:
    """A row for each case that the first target has."""
    first, *others = found
    head = ["", f"{first}, ms", *(f"{name}, ms (its time over {first}'s)" for name in others)]
    rows = [head, ["---"] * len(head)]
    for case, seconds in found[first].items():
        row = [case, number(1000 * sorted(seconds)[len(seconds) // 2])]
        for name in others:
            if len(theirs := found[name].get(case, ())) != len(seconds):
                row.append("-")
                continue
            ratio = paired_ratio(theirs, seconds)
            time = number(1000 * sorted(theirs)[len(theirs) // 2])
            row.append(f"{time} ({ratio.of_medians:.2f}; {ratio.low:.2f} to {ratio.high:.2f})")
        rows.append(row)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Raises `BatonError`."""
    parser = argparse.ArgumentParser(prog="python -m baton.bench.limits.step_turns", description=__doc__)
    parser.add_argument("targets", nargs="+", metavar="NAME=COMMAND")
    parser.add_argument("--cores", default="0", help="a list; each target gets as many threads")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", default="512,4096")
    parser.add_argument("--steps", default=_DEFAULT_STEPS, help=f"BATCHxCONTEXT,... (default {_DEFAULT_STEPS})")
    flags = parser.parse_args(argv)
    targets = dict(each.partition("=")[::2] for each in flags.targets)
    if not all(targets.values()):
        raise InvalidSetting("a target is NAME=COMMAND")
    cores = {int(core) for core in flags.cores.split(",")}
    asked = ["--threads", str(len(cores)), "--prompts", flags.prompts, "--steps", flags.steps]
    found: dict[str, dict[str, list[float]]] = {name: {} for name in targets}
    for turn in range(flags.rounds):
        for name, command in targets.items():
            sys.stderr.write(f"round {turn + 1}: {name}\n")
            for case, seconds in measure([*shlex.split(command), *asked], cores).items():
                found[name].setdefault(case, []).append(seconds)
    sys.stdout.write(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
