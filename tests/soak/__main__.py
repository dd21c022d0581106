"""`python -m tests.soak --minutes M`: a relay under load and faults that no program dies of, one every ten seconds.

It is a campaign (`tests.campaign`) of which every program lives to the end, so that what it holds can be compared over
its whole life: files, threads and memory have to be flat. Whatever a campaign checks, this checks too. With
`--resume FOLDER` it is one part more of the soak in that folder, or the first one; what all parts have shown together
is printed at the end. More flags are those of a campaign; a later part has those of the first.
"""

from __future__ import annotations

import asyncio
import datetime
import shutil
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.campaign import campaign, report
from tests.campaign.settings import CampaignSettings, parse
from tests.soak.kept import Kept, Part, SoakRefused, locked
from tests.soak.summary import grown, summary
from tests.soak.watch import PartWatch, left_behind

KINDS = "freeze,slow,cut,delay,throttle,loss,hole,hole-one-way,descriptors,disk-full,router-freeze,router-slow"
_PER_MINUTE = 6
_OF_ONE_PART = ("num_faults", "minutes", "seed", "folder", "results")
_LARGE = ("*.stamps", "model", "journals")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 if nothing was found, 2 if the folder cannot be used."""
    parser = ArgumentParser(prog="python -m tests.soak", description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="of the parts; a new one begins a soak")
    options, more = parser.parse_known_args(argv)
    folder = options.resume or Path(tempfile.mkdtemp(prefix="baton-soak-"))
    try:
        with locked(folder):
            return _run_part(folder, options.minutes, more)
    except SoakRefused as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def _run_part(folder: Path, minutes: float, flags: Sequence[str]) -> int:
    given = parse(["--kinds", KINDS, *flags])
    kept = Kept.read(folder)
    if kept is None:
        kept = Kept(folder, configuration_of(given), given.seed)
    elif flags:
        kept.require(configuration_of(given))
    part = kept.begin(_code_version(), f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M}")
    relay = folder / "relay"
    settings = replace(
        settings_of(kept.configuration, given), num_faults=round(minutes * _PER_MINUTE), minutes=minutes, seed=part.seed
    )
    watch = PartWatch(kept, part)
    found = asyncio.run(campaign.run(replace(settings, folder=relay), has_private_shm=False, watcher=watch.watch))
    part.findings = [finding.splitlines()[0] for finding in found]
    _close(kept, part, relay)
    if part.findings:  # the next part writes over its logs
        shutil.copytree(
            relay, folder / f"part-{part.number}", ignore=shutil.ignore_patterns(*_LARGE), dirs_exist_ok=True
        )
    report.tell("\n".join(["", *summary(kept.parts), *grown(kept.parts)]))
    return 1 if part.findings else 0


def _close(kept: Kept, part: Part, relay: Path) -> None:
    """The part is over: note what it and those before have left, and what grows."""
    part.left, part.has_ended = left_behind(kept.parts, relay), True
    for what in ("processes", "segments"):
        if part.left[what]:
            part.findings.append(f"{part.left[what]} {what} of parts that are over are left")
    part.findings += grown(kept.parts)
    if not (part.left["processes"] or part.left["segments"]):
        for each in kept.parts[:-1]:
            each.processes, each.segments = [], []
    kept.write()


def configuration_of(settings: CampaignSettings) -> dict[str, Any]:
    """What all parts of a soak have in common, as JSON has it."""
    whole = {name: value for name, value in asdict(settings).items() if name not in _OF_ONE_PART}
    return whole | {"kinds": list(settings.kinds)}


def settings_of(configuration: Mapping[str, Any], given: CampaignSettings) -> CampaignSettings:
    """The settings of a part; `given` has the times and what the configuration did not know yet."""
    return replace(given, **{**configuration, "kinds": tuple(configuration["kinds"])})


def _code_version() -> str:
    """The commit, and whether there are changes."""
    commands = (["git", "rev-parse", "--short=12", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"])
    try:
        commit, changes = (
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{commit} with changes" if changes else commit


if __name__ == "__main__":
    sys.exit(main())
