"""The stamps of one program: the last `NUM_STAMPS` of them, in a file that it has mapped.

A stamp costs no system call but those that read how long its threads have waited for a processor. The file has its size
from the beginning, so a full disk changes nothing, and it can be read while the program is stopped, or dead. A new life
of the program begins it anew. Has no lock: one thread stamps, and a reader that meets a stamp which is being written
over gets an old or a damaged one, of a moment that it does not ask for.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

NUM_STAMPS = 2**17
STAMP = struct.Struct("<ddddQQIHH")
_LINK_THREADS = "ZMQbg/IO"
_TURN_S = 0.02


class Station(IntEnum):
    """Where a stamp is made. `TURN`: of no token, when an event loop runs its timer."""

    EMITTED = 1
    RECEIVED = 2
    TAKEN = 3
    WRITTEN = 4
    TURN = 5


def request_key(request_id: str) -> int:
    """Of the id that an answer has in `x-request-id`."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest())


def handoff_key(handoff_id: bytes) -> int:
    """Of the id that a request has between router and nodes."""
    return int.from_bytes(handoff_id[-8:])


class Waits:
    """How long threads of this process have waited for a processor: the one that makes this, and those of its links,
    which have to be there. A thread that cannot be looked at, for want of descriptors, has not waited."""

    def __init__(self) -> None:
        self._own = _open_schedstats(f"{threading.get_native_id()}")
        self._links = _open_schedstats(*_link_threads())

    def own_s(self) -> float:
        """Of the thread that made this, since it began."""
        return _waited_s(self._own)

    def links_s(self) -> float:
        """Of the threads that send and receive for ZMQ, added up."""
        return _waited_s(self._links)


class Ring:
    """See the module. The thread that stamps first is the one whose waits are told."""

    def __init__(self, path: Path) -> None:
        with path.open("wb+") as file:
            file.truncate(NUM_STAMPS * STAMP.size)
            self._stamps = mmap.mmap(file.fileno(), 0)
        self._num_stamps = 0

    @cached_property
    def _waits(self) -> Waits:
        return Waits()

    def add(self, station: Station, request: int = 0, handoff: int = 0, choice: int = 0, index: int = 0) -> None:
        """Token `index` of a request passes the station now."""
        place = self._num_stamps % NUM_STAMPS * STAMP.size
        now = (time.monotonic(), time.thread_time(), self._waits.own_s(), self._waits.links_s())
        STAMP.pack_into(self._stamps, place, *now, request, handoff, index, choice, station)
        self._num_stamps += 1


def _link_threads() -> Iterator[str]:
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            if (task / "comm").read_text().startswith(_LINK_THREADS):
                yield task.name


def _open_schedstats(*threads: str) -> list[int]:
    found = []
    for thread in threads:
        with contextlib.suppress(OSError):
            found.append(os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC))
    return found


def _waited_s(schedstats: Sequence[int]) -> float:
    return sum(int(os.pread(each, 64, 0).split()[1]) for each in schedstats) / 1e9


async def stamp_turns(ring: Ring) -> None:
    """Stamp the turns of this loop, fifty a second, until cancelled."""
    while True:
        ring.add(Station.TURN)
        await asyncio.sleep(_TURN_S)
