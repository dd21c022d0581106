"""What this machine can do without Baton: a core can copy, hash, both, send to another core through plain TCP, and hand
it a ZMQ message; NIXL can write.

`python -m baton.bench.kv.limits_process`, one on each of two cores; `spec` is {"core": bytes of a buffer} or {"nixl":
[number of blocks, bytes of a block]}. Each command returns seconds where it says nothing else.
"""

from __future__ import annotations

import base64
import os
import secrets
import socket
import time
from itertools import cycle
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
import zmq

from baton.bench.child import Worker, serve_parent
from baton.kvtransfer.transports.nixl.ucx import ucx_environment
from baton.wire.errors import RequestFailed
from baton.wire.links import LinkSettings, bind, connect, open_socket

_HOST = "127.0.0.1"
_PIECE_BYTES = 2**20
_WAIT_S = 60.0


class CoreLimits:
    """Two buffers, to be chosen much larger than the caches, with every page touched. See
    `baton.bench.child.Worker`."""

    def __init__(self, num_bytes: int) -> None:
        self._source, self._target = np.ones((2, num_bytes), dtype=np.uint8)
        self._listener = socket.create_server((_HOST, 0))
        self._listener.settimeout(_WAIT_S)
        self._connection: socket.socket | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pair = open_socket(self._context, zmq.PAIR, LinkSettings())

    def copy(self) -> float:
        begin_s = time.monotonic()
        np.copyto(self._target, self._source)
        return time.monotonic() - begin_s

    def hash(self, copies: bool = False) -> float:
        """One buffer, MiB by MiB; each copied before, and hashed while it is in the cache, where `copies` is set."""
        begin_s = time.monotonic()
        for first in range(0, len(self._source), _PIECE_BYTES):
            piece = self._source[first : first + _PIECE_BYTES]
            if copies:
                np.copyto(self._target[first : first + _PIECE_BYTES], piece)
            xxhash.xxh3_64_intdigest(piece.data)
        return time.monotonic() - begin_s

    def hash_for(self, duration_s: float) -> None:
        end_s = time.monotonic() + duration_s
        for first in cycle(range(0, len(self._source), _PIECE_BYTES)):
            if time.monotonic() >= end_s:
                return
            xxhash.xxh3_64_intdigest(self._source[first : first + _PIECE_BYTES].data)

    def bind(self) -> dict[str, Any]:
        """Where the other one finds this one; the arguments of `connect`."""
        return {"port": self._listener.getsockname()[1], "link": bind(self._pair, _HOST, 0, LinkSettings())}

    def connect(self, port: int, link: str) -> None:
        """To the other one, by TCP and by ZMQ with the options that every link of Baton has."""
        self._connection = socket.create_connection((_HOST, port), _WAIT_S)
        connect(self._pair, link, LinkSettings())

    def send(self) -> float:
        """Send the buffer; until the other end says that it has all of it."""
        begin_s = time.monotonic()
        self._tcp().sendall(self._source.data)
        self._tcp().recv(1)
        return time.monotonic() - begin_s

    def receive(self) -> None:
        """Receive the buffer and say so."""
        view, place = self._target.data, 0
        while place < len(view):
            num_bytes = self._tcp().recv_into(view[place:], min(_PIECE_BYTES, len(view) - place))
            if not num_bytes:
                raise RequestFailed("the other end has gone")
            place += num_bytes
        self._tcp().sendall(b"\0")

    def round_trips(self, count: int, message_bytes: int, pause_s: float = 0.0) -> list[float]:
        """A ZMQ message to the other end and back, so often, each after a pause."""
        taken_s = []
        for _ in range(count):
            if pause_s:
                time.sleep(pause_s)
            begin_s = time.monotonic()
            self._pair.send(bytes(message_bytes))
            self._receive_message()
            taken_s.append(time.monotonic() - begin_s)
        return taken_s

    def send_back(self, count: int) -> None:
        for _ in range(count):
            self._pair.send(self._receive_message())

    def close(self) -> None:
        self._listener.close()
        self._context.destroy(linger=0)
        if self._connection is not None:
            self._connection.close()

    def _tcp(self) -> socket.socket:
        """The connection to the other end: the one that was made to it, or the one that it made."""
        if self._connection is None:
            self._connection, _ = self._listener.accept()
            self._connection.settimeout(_WAIT_S)
        return self._connection

    def _receive_message(self) -> bytes:
        if not self._pair.poll(int(_WAIT_S * 1000)):
            raise RequestFailed("the other end has gone")
        return self._pair.recv()


class BareAgent:
    """One agent of NIXL and its blocks, without Baton: what its transport can be held against. See `Worker`.

    Descriptors are prepared beforehand, and both ends poll without a pause: the fastest that two agents can be.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        os.environ.update({"NIXL_LOG_LEVEL": "WARN", **ucx_environment(_HOST, os.environ)})
        # reads the environment, and takes seconds
        from nixl import nixl_agent, nixl_agent_config

        self._num_blocks, self._block_bytes = num_blocks, block_bytes
        self._memory = np.ones(num_blocks * block_bytes, dtype=np.uint8)
        self._address = int(self._memory.ctypes.data)
        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._nixl: Any = nixl_agent(secrets.token_hex(16), config)
        self._nixl.register_memory(np.array([[self._address, self._memory.nbytes, 0]], dtype=np.uint64), "DRAM")
        self._sources = self._nixl.prep_xfer_dlist("NIXL_INIT_AGENT", self._descriptors(self._address), "DRAM")
        self._targets: Any = None

    def details(self) -> dict[str, Any]:
        """What the other one needs to write here; the arguments of `connect`."""
        return {"metadata": base64.b64encode(self._nixl.get_agent_metadata()).decode(), "address": self._address}

    def connect(self, metadata: str, address: int) -> None:
        name = self._nixl.add_remote_agent(base64.b64decode(metadata))
        self._targets = self._nixl.prep_xfer_dlist(name, self._descriptors(address), "DRAM")

    def write(self, first: int, count: int) -> float:
        """Seconds from the making of a write to its end."""
        ids = np.arange(first, first + count, dtype=np.int32)
        begin_s = time.monotonic()
        handle = self._nixl.make_prepped_xfer("WRITE", self._sources, ids, self._targets, ids, b"landed")
        state = self._nixl.transfer(handle)
        while state == "PROC" and time.monotonic() - begin_s < _WAIT_S:
            state = self._nixl.check_xfer_state(handle)
        taken_s = time.monotonic() - begin_s
        handle.release()
        if state != "DONE":
            raise RequestFailed(f"a bare write ended as {state}")
        return taken_s

    def wait_for_notice(self) -> None:
        deadline_s = time.monotonic() + _WAIT_S
        while not self._nixl.get_new_notifs():
            if time.monotonic() > deadline_s:
                raise RequestFailed("a bare write did not arrive")

    def close(self) -> None:
        """See `Worker`: the process ends, and the agent with it."""

    def _descriptors(self, address: int) -> npt.NDArray[np.uint64]:
        starts = address + np.arange(self._num_blocks, dtype=np.uint64) * np.uint64(self._block_bytes)
        return np.stack([starts, np.full_like(starts, self._block_bytes), np.zeros_like(starts)], axis=1)


def _begin(spec: dict[str, Any]) -> Worker:
    return BareAgent(*spec["nixl"]) if "nixl" in spec else CoreLimits(spec["core"])


if __name__ == "__main__":
    serve_parent(_begin)
    # no destructors: nixl's could wait for a peer that has gone
    os._exit(0)
