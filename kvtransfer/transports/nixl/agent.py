"""The agent: the one place that runs nixl. A process of its own (`python -m baton.kvtransfer.transports.nixl.agent`,
started by `process`) for pools in host memory, a thread of the node (`thread`) for pools on a GPU.

Owns the nixl agent of one node and direction, the registration of the node's pool, and every write in flight. Knows no
handoffs: notices pass through as bytes.

One thread does everything. nixl's own progress thread stays off: it spins on a core, and is slower than this loop where
cores are few. nixl makes progress when it is asked for notices or for the state of a write (see `Pace`).

A write that has begun cannot be undone: releasing it does not stop the bytes. It ends by itself, by the failure of its
connection, or with the agent. A process may be killed at any time: that is what it is for. A thread is asked to stop,
then tears the agent down (`Agent.close`) in milliseconds; one that does not return proves nothing.

The process inherits the pool, a shared segment, by descriptor, and ends with its parent (`baton.runtime.child`).
Standard output is not used: what libraries print goes to standard error, which the node reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.kvtransfer.process_identity import this_process
from baton.kvtransfer.transports.nixl.memory import DRAM, VRAM, Region
from baton.kvtransfer.transports.nixl.naming import Naming, fresh_name
from baton.kvtransfer.transports.nixl.wire import (
    COMMANDS,
    MAX_METADATA_BYTES,
    MAX_NOTICE_BYTES,
    MAX_NOTICES,
    REPORTS,
    Channel,
    Connect,
    Disconnect,
    Notices,
    PeerEnded,
    PoolDetails,
    Ready,
    Watch,
    Write,
    WriteEnded,
)
from baton.kvtransfer.transports.nixl.writes import Runs, WholeBlocks

_PR_SET_TIMERSLACK = 29
_MADV_POPULATE_WRITE = 23
_TIMER_SLACK_NS = 1000
_STAYS_LIVELY_S = 0.003
_BUSY_PROGRESS_S = 0.00005
_MAX_BACKLOG_BYTES = 2**24
_LOCAL = "NIXL_INIT_AGENT"


@dataclass(frozen=True, slots=True)
class Pace:
    """The pauses of the loop, in seconds: with a write in flight, shortly after something moved, while notices are
    expected, and otherwise. A message from the node ends every pause."""

    writing_s: float
    moving_s: float
    expecting_s: float = 0.001
    idle_s: float = 0.05


OWN_PROCESS = Pace(writing_s=0.00005, moving_s=0.0001)
BESIDE_ENGINE = Pace(writing_s=0.0002, moving_s=0.0002)
"""On a thread of the node. A turn of the loop holds the interpreter for some 10 to 20 us, while the engine may need it:
at 50 us between turns that would be a fourth of the time, at 200 us it is a tenth. A piece of 16 MiB is in flight for
40 us (NVLink) to 350 us (400 Gb/s), several at once, and nobody has to act in between."""


@dataclass(slots=True)
class _Peer:
    """A connection to another agent. `name`: what nixl knows it by here; `writes`: `WholeBlocks` or `Runs`. Two may
    lead to the same agent: one that is leaving and its successor."""

    name: str
    writes: WholeBlocks | Runs
    is_leaving: bool = False


@dataclass(slots=True)
class _InFlight:
    write_id: int
    peer_id: int
    handle: Any


class Agent:
    """Carries out commands on the pool in `region` and reports on `channel`, until the node hangs up or `stopped`.

    Raises nixl's errors, and `RuntimeError` when the memory cannot be registered.
    """

    def __init__(self, channel: Channel, region: Region, pace: Pace, stopped: threading.Event | None = None) -> None:
        nixl = _import_nixl()
        self._channel = channel
        self._region = region
        self._pace = pace
        self._stopped = stopped or threading.Event()
        self._name = fresh_name()
        self._nixl: Any = nixl.nixl_agent(
            self._name, nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        )
        self._registered = self._register(region)
        self._sources: Any = self._nixl.prep_xfer_dlist(_LOCAL, region.blocks(), region.kind)
        self._peers: dict[int, _Peer] = {}
        self._in_flight: list[_InFlight] = []
        self._abandoned: list[Any] = []
        self._is_expecting = False
        self._lively_until_s = 0.0
        metadata = self._nixl.get_agent_metadata()
        if len(metadata) > MAX_METADATA_BYTES:
            raise ValueError(f"nixl's metadata is {len(metadata)} bytes, more than {MAX_METADATA_BYTES}")
        self._naming = Naming(self._name, metadata)
        details = PoolDetails(metadata, region.base_address, region.num_bytes, region.kind, region.device_index)
        channel.send(Ready(self._name, this_process(), details))

    def run(self) -> None:
        """Carry out commands until the node hangs up or says stop."""
        while self._channel.is_open and not self._stopped.is_set():
            if self._wait():
                self._take_commands()
            self._check_writes()
            self._let_leave()
            self._pass_notices_on()
            if self._channel.num_waiting_bytes:
                self._channel.flush()

    def close(self) -> None:
        """Give everything back, for a process that lives on. When this returns, peers cannot reach the pool by this
        agent, and nothing that it began reads or writes the pool.

        Releasing a request in flight does not end it. The registration ends with the agent, since UCX may cache it
        until then, and the agent is destroyed with the last handle that it made. Copies on a GPU go on through all of
        that. So they are waited for before mappings of the peers' memory are closed, and again when nothing is left
        that could begin one.

        Raises whatever went wrong: then none of this is proven. Do not call it while an exception is handled that
        passed through `run`: its frames hold on to requests.
        """
        self._channel.flush()
        while self._in_flight:
            _attempt(self._in_flight.pop().handle.release)
        self._region.settle()
        for peer_id in list(self._peers):
            _attempt(self._disconnect, peer_id)
        _attempt(self._sources.release)
        _attempt(self._nixl.deregister_memory, self._registered)
        native = weakref.ref(self._nixl.agent)
        self._abandoned.clear()
        self._nixl = self._sources = self._registered = None
        if native() is not None:
            raise RuntimeError("something still refers to nixl's agent")
        self._region.settle()

    def _register(self, region: Region) -> Any:
        try:
            return self._nixl.register_memory(region.whole(), region.kind)
        except Exception as error:  # as in _connect
            what = f"memory of GPU {region.device_index}" if region.kind == VRAM else "host memory"
            raise RuntimeError(f"{what} cannot be registered ({_reason(error)})") from None

    def _wait(self) -> bool:
        """Pause for as long as the state of things allows; whether commands have come."""
        if self._in_flight:
            wait_s = self._pace.writing_s
        elif time.monotonic() < self._lively_until_s:
            wait_s = self._pace.moving_s
        else:
            wait_s = self._pace.expecting_s if self._is_expecting else self._pace.idle_s
        return bool(select.select([self._channel.socket], [], [], wait_s)[0])

    def _take_commands(self) -> None:
        self._lively_until_s = time.monotonic() + _STAYS_LIVELY_S
        for command in self._channel.receive():
            if self._stopped.is_set():
                return
            self._carry_out(command)

    def _carry_out(self, command: object) -> None:
        match command:
            case Watch(is_expecting):
                self._is_expecting = is_expecting
            case Connect():
                self._connect(command)
            case Write():
                self._write(command)
            case Disconnect(peer_id) if peer_id in self._peers:
                self._peers[peer_id].is_leaving = True

    def _connect(self, command: Connect) -> None:
        try:
            name, metadata = self._naming.rename(command.agent_name, command.details.metadata)
            pool = _region_of_peer(command)
            try:
                self._nixl.add_remote_agent(metadata)
                writes = self._writes_into(name, pool, command)
            except Exception:
                _attempt(self._nixl.remove_remote_agent, name)
                raise
        except Exception as error:  # nixl's own kinds have no common root, and this peer is to blame for all of them
            self._channel.send(PeerEnded(command.peer_id, _reason(error)))
            return
        self._peers[command.peer_id] = _Peer(name, writes)

    def _writes_into(self, name: str, pool: Region, command: Connect) -> WholeBlocks | Runs:
        if not command.sizes:
            return WholeBlocks(self._sources, self._nixl.prep_xfer_dlist(name, pool.blocks(), pool.kind))
        sources = self._region.runs(command.sources, command.sizes)
        return Runs(self._region, pool, name, sources, pool.runs(command.targets, command.sizes))

    def _write(self, command: Write) -> None:
        peer = self._peers.get(command.peer_id)
        if peer is None:
            self._channel.send(WriteEnded(command.write_id, False, "the peer is not connected"))
            return
        try:
            handle = peer.writes.begin(self._nixl, command)
        except Exception as error:  # as in _connect
            self._channel.send(WriteEnded(command.write_id, False, _reason(error)))
            return
        write = _InFlight(command.write_id, command.peer_id, handle)
        try:
            state = self._nixl.transfer(handle)
        except Exception as error:  # as in _connect
            self._end(write, _reason(error))
            return
        if state == "PROC":
            self._in_flight.append(write)
        else:
            self._end(write, "" if state == "DONE" else "the write failed")

    def _check_writes(self) -> None:
        remaining = []
        for write in self._in_flight:
            try:
                state = self._nixl.check_xfer_state(write.handle)
            except Exception as error:  # as in _connect
                self._end(write, _reason(error))
                continue
            if state == "PROC":
                remaining.append(write)
            else:
                self._end(write, "" if state == "DONE" else "the write failed")
        self._in_flight = remaining

    def _end(self, write: _InFlight, error: str) -> None:
        self._lively_until_s = time.monotonic() + _STAYS_LIVELY_S
        try:
            write.handle.release()
        except Exception:  # as in _connect; a handle that cannot be released must not be touched by its destructor
            self._abandoned.append(write.handle)
        if error:
            self._region.settle()  # what it did not wait for may still be read
        self._channel.send(WriteEnded(write.write_id, True, error))

    def _let_leave(self) -> None:
        """Disconnect peers that are to leave and have no write in flight."""
        leaving = [peer_id for peer_id, peer in self._peers.items() if peer.is_leaving]
        busy = {write.peer_id for write in self._in_flight}
        for peer_id in leaving:
            if peer_id in busy:
                continue
            error = ""
            try:
                self._disconnect(peer_id)
            except Exception as failure:  # as in _connect
                error = _reason(failure)
            self._channel.send(PeerEnded(peer_id, error))

    def _disconnect(self, peer_id: int) -> None:
        peer = self._peers.pop(peer_id)
        try:
            peer.writes.release()
        finally:
            self._nixl.remove_remote_agent(peer.name)

    def _pass_notices_on(self) -> None:
        began_s = time.perf_counter()
        arrived = [notice for notices in self._nixl.get_new_notifs().values() for notice in notices]
        if arrived or time.perf_counter() - began_s > _BUSY_PROGRESS_S:
            self._lively_until_s = time.monotonic() + _STAYS_LIVELY_S
        fitting = [bytes(notice) for notice in arrived if len(notice) <= MAX_NOTICE_BYTES]
        for first in range(0, len(fitting), MAX_NOTICES):
            # a node that does not listen loses notices, and with them handoffs; never memory without end
            if self._channel.num_waiting_bytes < _MAX_BACKLOG_BYTES:
                self._channel.send(Notices(tuple(fitting[first : first + MAX_NOTICES])))


def _import_nixl() -> Any:
    """The package, imported where an agent runs and nowhere else.

    To learn a CUDA version nixl may import torch, which costs an agent process 2 s and 250 MB for nothing. So torch is
    hidden from it unless it is imported already, as in a node; nixl then takes whichever of its builds is installed.
    """
    if "torch" in sys.modules:
        return importlib.import_module("nixl")
    sys.modules["torch"] = None  # type: ignore[assignment]  # how Python marks what cannot be imported
    try:
        return importlib.import_module("nixl")
    finally:
        del sys.modules["torch"]


def _region_of_peer(command: Connect) -> Region:
    """The peer's pool, as its endpoint describes it."""
    details = command.details
    if details.memory not in (DRAM, VRAM):
        raise ValueError(f"memory of a kind that nobody knows: {details.memory!r}")
    return Region(details.base_address, details.num_bytes, command.num_blocks, details.memory, details.device_index)


def _attempt(call: Callable[..., object], *arguments: object) -> None:
    """Try one step of a teardown. Whether all of them went well is seen by the agent's end."""
    with contextlib.suppress(Exception):
        call(*arguments)


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:1000]


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def main() -> None:
    """The arguments are SOCKET SEGMENT NUM_BLOCKS BLOCK_BYTES: descriptors and sizes, set by the node."""
    end, segment, num_blocks, block_bytes = map(int, sys.argv[1:])
    _prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS)  # else a wait of 50 us takes 100
    os.dup2(2, 1)
    mapped = mmap.mmap(segment, num_blocks * block_bytes)
    with contextlib.suppress(OSError):  # an older kernel: the first write of each page is slower then
        mapped.madvise(_MADV_POPULATE_WRITE)
    memory = np.frombuffer(mapped, dtype=np.uint8)
    os.close(segment)
    region = Region(int(memory.ctypes.data), memory.size, num_blocks)
    Agent(Channel(socket.socket(fileno=end), REPORTS, COMMANDS), region, OWN_PROCESS).run()
    # no destructors: nixl's could wait for peers, and the kernel gives back all there is
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
