"""What has to be said beside every figure: the machine, the versions, the commit. Knows no benchmark."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from baton.bench.numbers import size

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Facts:
    """One run's surroundings. `load_average` is over the minute before; "" and 0 where the system does not tell."""

    time: str
    command: str
    commit: str
    cpu_model: str
    num_cores: int
    cores: tuple[int, ...]
    memory_bytes: int
    kernel: str
    load_average: float
    versions: dict[str, str]

    @property
    def conditions(self) -> tuple[tuple[str, str], ...]:
        """Names and texts that belong beside every figure."""
        machine = (
            f"{self.cpu_model or 'unknown processor'}, {self.num_cores} cores, {size(self.memory_bytes)}, "
            f"{self.kernel}, load average before {self.load_average:.2f}"
        )
        return (
            ("command", self.command),
            ("commit", self.commit or "unknown"),
            ("date", self.time),
            ("machine", machine),
            ("ran on cores", ", ".join(map(str, self.cores))),
            ("versions", ", ".join(f"{name} {version}" for name, version in self.versions.items())),
        )


def as_lines(conditions: Iterable[tuple[str, object]]) -> str:
    return "\n".join(f"{name}: {text}" for name, text in conditions)


def collect_facts(command: str, packages: Sequence[str]) -> Facts:
    """Facts now. Of `packages`, those that are installed are named with their versions."""
    return Facts(
        time=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=command,
        commit=_commit(),
        cpu_model=_field("/proc/cpuinfo", "model name"),
        num_cores=os.cpu_count() or 0,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        memory_bytes=int(_field("/proc/meminfo", "MemTotal").removesuffix("kB").strip() or 0) * 1024,
        kernel=f"{platform.system()} {platform.release()}",
        load_average=os.getloadavg()[0],
        versions={"python": platform.python_version(), **_versions(packages)},
    )


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """The commit of the source tree, with "+" when files differ from it; "" outside of a repository."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    return commit + "+" * bool(commit and _git("status", "--porcelain"))


def _git(*arguments: str) -> str:
    try:
        found = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()


def _field(path: str, name: str) -> str:
    """The first `name: value` of a file of /proc."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
