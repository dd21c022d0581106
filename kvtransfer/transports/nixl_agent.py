"""The agent process: the one place that runs nixl. `python -m kvtransfer.transports.nixl_agent` by `nixl_process`.

Owns the nixl agent of one node and direction, the registration of the node's pool (a shared segment that it inherits
by descriptor), and every write under way. Knows no handoffs: notices pass through as bytes.

One thread does everything, nixl's own progress thread stays off: that one spins on a core, and is slower than this
loop where cores are few. Progress is made when nixl is asked for notices or for the state of a write; the loop asks
often while something moves and seldom otherwise.

A write that has begun cannot be taken back: releasing it does not stop the bytes. It ends by itself, by the failure of
its connection, or with this process, which the node may kill at any time. That is what this process is for.

It ends with its parent, whatever happens to either. Standard output is not used: what libraries print goes to standard
error, which the node reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtransfer.host import this_process
from kvtransfer.transports.nixl_wire import (
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

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_MADV_POPULATE_WRITE = 23
_TIMER_SLACK_NS = 1000
_WRITING_WAIT_S = 0.00005
_MOVING_WAIT_S = 0.0001
_EXPECTING_WAIT_S = 0.001
_IDLE_WAIT_S = 0.05
_STAYS_LIVELY_S = 0.003
_BUSY_PROGRESS_S = 0.00005
_MAX_BACKLOG_BYTES = 2**24
_LOCAL = "NIXL_INIT_AGENT"


@dataclass(slots=True)
class _Remote:
    """Another agent as nixl knows it. Several peers may mean the same: one that is leaving and its successor."""

    name: str
    metadata: bytes
    num_peers: int = 0
    has_failed: bool = False


@dataclass(slots=True)
class _Peer:
    remote: _Remote
    targets: Any
    is_leaving: bool = False


@dataclass(slots=True)
class _UnderWay:
    write_id: int
    peer_id: int
    handle: Any


class Agent:
    """Carries out commands on the pool `memory` [num_blocks * block_bytes] and reports on `channel`."""

    def __init__(self, channel: Channel, memory: npt.NDArray[np.uint8], num_blocks: int) -> None:
        # slow to import, and only ever in this process
        from nixl import nixl_agent, nixl_agent_config

        self._channel = channel
        self._block_bytes = memory.size // num_blocks
        self._name = secrets.token_hex(16)
        self._nixl = nixl_agent(self._name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        base_address = int(memory.ctypes.data)
        self._nixl.register_memory(np.array([[base_address, memory.size, 0]], dtype=np.uint64), "DRAM")
        self._sources = self._nixl.prep_xfer_dlist(_LOCAL, self._blocks(base_address, num_blocks), "DRAM")
        self._remotes: dict[str, _Remote] = {}
        self._peers: dict[int, _Peer] = {}
        self._under_way: list[_UnderWay] = []
        self._abandoned: list[Any] = []
        self._is_expecting = False
        self._lively_until_s = 0.0
        metadata = self._nixl.get_agent_metadata()
        if len(metadata) > MAX_METADATA_BYTES:
            raise ValueError(f"nixl's metadata is {len(metadata)} bytes, more than {MAX_METADATA_BYTES}")
        channel.send(Ready(self._name, this_process(), PoolDetails(metadata, base_address, memory.size)))

    def run(self) -> None:
        """Work until the node hangs up."""
        while self._channel.is_open:
            if self._wait():
                self._take_commands()
            self._check_writes()
            self._let_leave()
            self._pass_notices_on()
            if self._channel.num_waiting_bytes:
                self._channel.flush()

    def _wait(self) -> bool:
        """Pause for as long as the state of things allows; whether commands have come."""
        if self._under_way:
            wait_s = _WRITING_WAIT_S
        elif time.monotonic() < self._lively_until_s:
            wait_s = _MOVING_WAIT_S
        else:
            wait_s = _EXPECTING_WAIT_S if self._is_expecting else _IDLE_WAIT_S
        return bool(select.select([self._channel.socket], [], [], wait_s)[0])

    def _take_commands(self) -> None:
        self._lively_until_s = time.monotonic() + _STAYS_LIVELY_S
        for command in self._channel.receive():
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
            remote = self._remote(command.agent_name, command.details.metadata)
            remote.num_peers += 1
            try:
                blocks = self._blocks(command.details.base_address, command.num_blocks)
                targets = self._nixl.prep_xfer_dlist(remote.name, blocks, "DRAM")
            except Exception:
                self._leave(remote)
                raise
        except Exception as error:  # nixl's own kinds have no common root, and this peer is to blame for all of them
            self._channel.send(PeerEnded(command.peer_id, _reason(error)))
            return
        self._peers[command.peer_id] = _Peer(remote, targets)

    def _remote(self, name: str, metadata: bytes) -> _Remote:
        """The agent of this name, made known to nixl if it is not yet."""
        remote = self._remotes.get(name)
        if remote is None:
            self._introduce(name, metadata)
            remote = self._remotes[name] = _Remote(name, metadata)
        elif remote.metadata != metadata:
            raise ValueError("another agent has this name")
        elif remote.has_failed:
            raise ValueError("the failed connection to it has not been given up yet")
        return remote

    def _introduce(self, name: str, metadata: bytes) -> None:
        """Make an agent known to nixl. Metadata that names another one is refused.

        Where nixl itself refuses damaged metadata it may keep half of it, and refuses the right one under that name
        afterwards. Names are random, so nobody but a peer that damages its own metadata can suffer from that.
        """
        found = _text(self._nixl.add_remote_agent(metadata))
        if found != name:
            if found not in self._remotes:
                self._nixl.remove_remote_agent(found)
            raise ValueError("its metadata belongs to another agent")

    def _write(self, command: Write) -> None:
        peer = self._peers.get(command.peer_id)
        if peer is None:
            self._channel.send(WriteEnded(command.write_id, False, "the peer is not connected"))
            return
        try:
            handle = self._nixl.make_prepped_xfer(
                "WRITE",
                self._sources,
                np.asarray(command.sources, dtype=np.int32),
                peer.targets,
                np.asarray(command.targets, dtype=np.int32),
                command.notice,
            )
        except Exception as error:  # as in _connect
            self._channel.send(WriteEnded(command.write_id, False, _reason(error)))
            return
        write = _UnderWay(command.write_id, command.peer_id, handle)
        try:
            state = self._nixl.transfer(handle)
        except Exception as error:  # as in _connect
            self._end(write, _reason(error))
            return
        if state == "PROC":
            self._under_way.append(write)
        else:
            self._end(write, "" if state == "DONE" else "the write failed")

    def _check_writes(self) -> None:
        remaining = []
        for write in self._under_way:
            try:
                state = self._nixl.check_xfer_state(write.handle)
            except Exception as error:  # as in _connect
                self._end(write, _reason(error))
                continue
            if state == "PROC":
                remaining.append(write)
            else:
                self._end(write, "" if state == "DONE" else "the write failed")
        self._under_way = remaining

    def _end(self, write: _UnderWay, error: str) -> None:
        self._lively_until_s = time.monotonic() + _STAYS_LIVELY_S
        try:
            write.handle.release()
        except Exception:  # as in _connect; a handle that cannot be released must not be touched by its destructor
            self._abandoned.append(write.handle)
        if error:
            self._peers[write.peer_id].remote.has_failed = True
        self._channel.send(WriteEnded(write.write_id, True, error))

    def _let_leave(self) -> None:
        """Disconnect peers that are to leave and have no write under way."""
        leaving = [peer_id for peer_id, peer in self._peers.items() if peer.is_leaving]
        busy = {write.peer_id for write in self._under_way}
        for peer_id in leaving:
            if peer_id in busy:
                continue
            peer = self._peers.pop(peer_id)
            error = ""
            try:
                peer.targets.release()
                self._leave(peer.remote)
            except Exception as failure:  # as in _connect
                error = _reason(failure)
            self._channel.send(PeerEnded(peer_id, error))

    def _leave(self, remote: _Remote) -> None:
        remote.num_peers -= 1
        if not remote.num_peers:
            del self._remotes[remote.name]
            self._nixl.remove_remote_agent(remote.name)

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

    def _blocks(self, base_address: int, num_blocks: int) -> npt.NDArray[np.uint64]:
        """Descriptors of a pool's blocks: address, size, device."""
        blocks = np.zeros((num_blocks, 3), dtype=np.uint64)
        blocks[:, 0] = base_address + np.arange(num_blocks, dtype=np.uint64) * np.uint64(self._block_bytes)
        blocks[:, 1] = self._block_bytes
        return blocks


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:1000]


def _die_with(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the thread that started this process ends; exit now when its process is gone."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def main() -> None:
    """`nixl_agent PARENT_PID SOCKET SEGMENT NUM_BLOCKS BLOCK_BYTES`: descriptors and sizes, set by the node."""
    parent_pid, end, segment, num_blocks, block_bytes = map(int, sys.argv[1:])
    _die_with(parent_pid)
    _prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS)  # else a wait of 50 us takes 100
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the node decides when this ends
    os.dup2(2, 1)
    region = mmap.mmap(segment, num_blocks * block_bytes)
    with contextlib.suppress(OSError):  # an older kernel: the first write of each page is slower then
        region.madvise(_MADV_POPULATE_WRITE)
    memory = np.frombuffer(region, dtype=np.uint8)
    os.close(segment)
    Agent(Channel(socket.socket(fileno=end), REPORTS, COMMANDS), memory, num_blocks).run()
    # no destructors: nixl's could wait for peers, and the kernel gives back all there is
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
