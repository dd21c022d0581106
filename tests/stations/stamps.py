"""Reads the stamps of all programs of a folder: when a token passed each station, and who waited meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tests.stations.ring import STAMP, Station

Rows: TypeAlias = "np.ndarray[Any, Any]"
ROUTER, CLIENT = "router", "client"
_ROW = np.dtype(
    [
        *zip(("moment_s", "ran_s", "own_s", "links_s"), ["<f8"] * 4, strict=True),
        *zip(("request", "handoff"), ["<u8"] * 2, strict=True),
        *zip(("index", "choice", "station"), ("<u4", "<u2", "<u2"), strict=True),
    ]
)
assert _ROW.itemsize == STAMP.size


@dataclass(frozen=True, slots=True)
class Passed:
    """When a token passed the stations, and the node that emitted it."""

    node: str
    emitted_s: float
    received_s: float
    taken_s: float
    written_s: float


class Stamps:
    """What `NAME.stamps` in `folder` say now of the time since a moment, for each program's name."""

    def __init__(self, folder: Path, since_s: float) -> None:
        self._rows = {path.stem: _read(path, since_s) for path in sorted(folder.glob("*.stamps"))}

    def rows(self, program: str) -> Rows:
        """All stamps of a program, in the order of time."""
        return self._rows.get(program, np.empty(0, _ROW))

    def passed(self, request: int, choice: int, index: int) -> Passed | None:
        """The way of output `index` of a choice, or of what it came with; None when it is not known as a whole."""
        rows = self.rows(ROUTER)
        of_choice = rows[(rows["request"] == request) & (rows["choice"] == choice) & (rows["index"] >= index)]
        firsts = [
            _first(of_choice, of_choice["station"] == each)
            for each in (Station.RECEIVED, Station.TAKEN, Station.WRITTEN)
        ]
        received, taken, written = firsts
        if received is None or taken is None or written is None:
            return None
        received_s = float(received["moment_s"])
        emitted = max(self._emitted(int(received["handoff"]), index, received_s), default=None)
        if emitted is None:
            return None
        return Passed(emitted[1], emitted[0], received_s, float(taken["moment_s"]), float(written["moment_s"]))

    def last_written(self, request: int, choice: int, until_s: float) -> int:
        """The last output of a choice that the router had written by then; -1: none."""
        rows = self.rows(ROUTER)
        of_choice = rows[(rows["request"] == request) & (rows["choice"] == choice) & (rows["moment_s"] <= until_s)]
        written = of_choice["index"][of_choice["station"] == Station.WRITTEN]
        return int(written.max()) if len(written) else -1

    def waited_s(self, program: str, begun_s: float, ended_s: float) -> tuple[float, float, float]:
        """How long between these moments a program's thread waited for a processor, its threads of links did, and the
        thread ran. Stamps around them are looked at, so it may be too much by what was between."""
        rows = self.rows(program)
        if not len(rows):
            return 0.0, 0.0, 0.0
        moments_s = rows["moment_s"]
        first = max(0, int(np.searchsorted(moments_s, begun_s, "right")) - 1)
        last = min(len(rows) - 1, int(np.searchsorted(moments_s, ended_s, "left")))
        own_s, links_s, ran_s = (float(rows[name][last] - rows[name][first]) for name in ("own_s", "links_s", "ran_s"))
        return own_s, links_s, ran_s

    def _emitted(self, handoff: int, index: int, until_s: float) -> Iterator[tuple[float, str]]:
        for name, rows in self._rows.items():
            of_token = rows[(rows["handoff"] == handoff) & (rows["station"] == Station.EMITTED)]
            of_token = of_token[(of_token["index"] >= index) & (of_token["moment_s"] <= until_s)]
            if len(of_token):
                of_token = of_token[of_token["index"] == of_token["index"].min()]
                yield float(of_token["moment_s"].max()), name


def stalls(folder: Path, begun_s: float, ended_s: float) -> list[str]:
    """Where the router's loop stood in this time, by its log of that."""
    try:
        lines = (folder / "router.stalls").read_text().splitlines()
    except OSError:
        return []
    return [line for line in lines if begun_s < float(line.split()[0]) <= ended_s]


def _read(path: Path, since_s: float) -> Rows:
    rows = np.fromfile(path, _ROW)
    rows = rows[(rows["moment_s"] > 0) & (rows["moment_s"] >= since_s)]
    ordered: Rows = rows[np.argsort(rows["moment_s"], kind="stable")]
    return ordered


def _first(rows: Rows, chosen: Rows) -> Mapping[str, Any] | None:
    found = rows[chosen]
    return found[0] if len(found) else None
