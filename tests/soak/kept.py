"""What the parts of a soak have left in their folder: one file, written anew as a whole or not at all.

Owns that file and the rule that all parts of a folder have one configuration. A part that was killed has counted until
its last writing. Knows nothing of programs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

GOAL_HOURS = 24.0
FILE_NAME = "parts.json"


class SoakRefused(Exception):
    """The folder cannot be used; the message is one line for a person."""


@dataclass(frozen=True, slots=True)
class LongGap:
    """A stream stood still for `lasted_s`, where `allowed_s` were allowed, touched by faults of these kinds."""

    lasted_s: float
    allowed_s: float
    kinds: list[str]


@dataclass(slots=True)
class Part:
    """One part. `faults` are counted by kind, `requests` by how they ended, `excused` errors by reason. `samples`: for
    each program one line for each minute: seconds of running, files, threads, bytes. `lone_gaps`: to which station each
    gap belongs that no fault touched. `left`: what was there when it had ended, by name. `segments` of shared memory
    and `processes` (id and moment of start) are those that it had, until none of them is left."""

    number: int
    seed: int
    code: str
    begun_at: str
    running_s: float = 0.0
    has_ended: bool = False
    num_tokens: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)
    excused: dict[str, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    gaps: list[LongGap] = field(default_factory=list)
    lone_gaps: list[str] = field(default_factory=list)
    samples: dict[str, list[list[float]]] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    segments: list[str] = field(default_factory=list)
    processes: list[list[float]] = field(default_factory=list)


class Kept:
    """The parts so far in `folder`, of which the last one may run. `configuration`: settings that all parts have."""

    def __init__(
        self, folder: Path, configuration: Mapping[str, object], first_seed: int, parts: Sequence[Part] = ()
    ) -> None:
        self.configuration, self.first_seed, self.parts = dict(configuration), first_seed, list(parts)
        self._folder = folder

    @staticmethod
    def read(folder: Path) -> Kept | None:
        """What is there; None when nothing is. Raises `SoakRefused`."""
        path = folder / FILE_NAME
        try:
            found = json.loads(path.read_text())
            parts = [Part(**each | {"gaps": [LongGap(**gap) for gap in each["gaps"]]}) for each in found["parts"]]
            return Kept(folder, found["configuration"], found["first_seed"], parts)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise SoakRefused(f"{path} cannot be read as the parts of a soak: {error!r}") from None

    def require(self, configuration: Mapping[str, object]) -> None:
        """Raise `SoakRefused` when a part with this configuration does not belong to the others."""
        names = sorted(self.configuration.keys() | configuration.keys())
        pairs = [(name, self.configuration.get(name), configuration.get(name)) for name in names]
        if others := [f"{name} is {mine} there and {other} here" for name, mine, other in pairs if mine != other]:
            raise SoakRefused(f"{self._folder} is a soak of another configuration: {'; '.join(others)}")

    def begin(self, code: str, begun_at: str) -> Part:
        """The next part, with the next seed."""
        number = len(self.parts) + 1
        self.parts.append(Part(number, self.first_seed + number - 1, code, begun_at))
        return self.parts[-1]

    def write(self) -> None:
        """Put all parts into the file, at once."""
        parts = [json.dumps(asdict(part), separators=(",", ":")) for part in self.parts]
        head = f'{{"configuration":{json.dumps(self.configuration)},"first_seed":{self.first_seed},"parts":[\n'
        temporary = self._folder / f"{FILE_NAME}.new"
        with temporary.open("w") as file:
            file.write(head + ",\n".join(parts) + "\n]}\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._folder / FILE_NAME)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Nobody else runs a part in this folder, which is made. Raises `SoakRefused`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SoakRefused(f"another part runs in {folder}") from None
        yield
