"""One end of a transport, driven by commands: in this process, or in one of its own.

As a program this is a starter of ends: it imports once what takes seconds, then forks for each end that it is asked for
over the inherited socket whose descriptor is its argument. A request is a role and a `Spec`, with the end's own socket;
the answer is the id of its process. The starter has no thread, which makes forking safe.

An end speaks JSON lines over its socket. What it does between commands is what a node's transfer thread does: push in
pieces, poll, note what happened. A command's answer is a JSON object, {"failure": text} when it raised.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import xxhash
import zmq

from baton.kvtransfer.messages import Endpoint
from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.transports.base import Blocks, Move, Sender
from baton.kvtransfer.transports.plugged import Site, Transport
from baton.kvtransfer.transports.shm.segment import Segment
from baton.kvtransfer.write_proof import WriteProof
from baton.runtime.process import start_authenticator
from baton.wire.errors import BatonError
from baton.wire.keys import ROUTER, KeyRing
from baton.wire.links import LinkSettings
from baton.wire.request_key import RequestKey

GUARD = 0xA5
"""What every byte of a receiver's pool is before a test."""


def source_bytes(seed: int, num_blocks: int, block_bytes: int) -> Blocks:
    """What a sender's pool holds."""
    words = np.random.default_rng(seed).integers(0, 2**63, num_blocks * block_bytes // 8, dtype=np.int64)
    return words.view(np.uint8).reshape(num_blocks, block_bytes)


_source_bytes_once = lru_cache(maxsize=1)(source_bytes)


def checksums(blocks: Blocks) -> list[int]:
    """One for each block."""
    return [xxhash.xxh3_64_intdigest(block.data) for block in blocks]


@dataclass(frozen=True, slots=True)
class Spec:
    """What an end is made of. `transport`: where a `Transport` is found, as "package.module:NAME"; `key_file` holds the
    cluster key, empty: none."""

    transport: str
    num_blocks: int
    block_bytes: int
    host: str = "127.0.0.1"
    key_file: str = ""

    @property
    def links(self) -> LinkSettings:
        return LinkSettings(cluster_key=KeyRing(Path(self.key_file), ROUTER).towards(ROUTER) if self.key_file else None)


class ReceiverEnd:
    """A receiver, its pool, and what it said."""

    def __init__(self, spec: Spec, stack: contextlib.ExitStack) -> None:
        site = open_site(spec, stack)
        self._blocks: Blocks = site.pool.memory
        self._receiver = found_transport(spec).open_receiver(site)
        stack.callback(self._receiver.close)
        self._blocks[:] = GUARD
        self._expected: set[int] = set()
        self._arrived: dict[int, list[int]] = {}

    def wait_on(self) -> Sequence[Any]:
        return self._receiver.wait_on()

    def work(self) -> bool:
        """One round; False: nothing is left that has to be tried again soon."""
        self._receiver.poll()
        for arrival in self._receiver.take_arrivals():
            number = int.from_bytes(arrival.key[0], "big")
            indices = range(arrival.first_index, arrival.first_index + arrival.count)
            self._arrived.setdefault(number, []).extend(indices)
        return False

    def hello(self) -> dict[str, Any]:
        endpoint = self._receiver.endpoint
        return {
            "endpoint": [endpoint.transport, endpoint.address, endpoint.details.hex()],
            "peers_write": self._receiver.write_proof is not WriteProof.OWN_HANDS,
            "is_silent": self._receiver.is_silent,
        }

    def expect(self, number: int, block_ids: list[int], generations: list[int]) -> None:
        self._expected.add(number)
        self._receiver.expect(RequestKey.numbered(number), block_ids, generations)

    def forget(self, number: int) -> None:
        self._expected.discard(number)
        self._receiver.forget(RequestKey.numbered(number))

    def arrived(self, number: int) -> list[int]:
        """Indices that were reported, in the order of reports."""
        return self._arrived.get(number, [])

    def checksums(self) -> list[int]:
        return checksums(self._blocks)

    def fence(self) -> bool:
        return self._receiver.fence()

    def guard(self, block_ids: list[int]) -> None:
        """Overwrite these blocks."""
        self._blocks[block_ids] = GUARD

    def reset(self) -> None:
        """As new."""
        for number in list(self._expected):
            self.forget(number)
        self._arrived.clear()
        self._blocks[:] = GUARD


class SenderEnd:
    """A sender, its pool, and pushes that are to be done."""

    def __init__(self, spec: Spec, stack: contextlib.ExitStack) -> None:
        self._transport, self._site = found_transport(spec), open_site(spec, stack)
        self._blocks: Blocks = self._site.pool.memory
        self._sender: Sender | None = None
        self._left: deque[tuple[RequestKey, list[Move]]] = deque()
        self._failure = ""
        stack.callback(self.close)

    def wait_on(self) -> Sequence[Any]:
        return self._sender.wait_on() if self._sender else ()

    def work(self) -> bool:
        """One round; True: pushes are left."""
        if self._sender is None or self._failure:
            return False
        try:
            self._sender.poll()
            while self._left and self._sender.push(*self._left[0]):
                self._left.popleft()
        except BatonError as error:
            self._failure = error.message
        return bool(self._left)

    def open(self, endpoint: list[str], num_target_blocks: int) -> None:
        """A new sender, in place of the old one."""
        self.close()
        self._failure = ""
        transport, address, details = endpoint
        reached = Endpoint(transport, address, bytes.fromhex(details))
        self._sender = self._transport.open_sender(self._site, reached, num_target_blocks)

    def fill(self, seed: int) -> None:
        """The pool's bytes."""
        self._blocks[:] = _source_bytes_once(seed, *self._blocks.shape)

    def wipe(self) -> None:
        """The pool's blocks belong to somebody else."""
        self._blocks[:] = 0

    def push(self, number: int, moves: list[list[int]], piece_bytes: int) -> None:
        """Push these blocks, `piece_bytes` at a time; 0: what the sender likes."""
        if self._sender is None:
            raise BatonError("there is no sender")
        count = max(1, (piece_bytes or self._sender.piece_bytes) // self._blocks.shape[1])
        pieces = [moves[first : first + count] for first in range(0, len(moves), count)] or [[]]
        self._left.extend((RequestKey.numbered(number), [Move(*move) for move in piece]) for piece in pieces)

    def status(self, number: int) -> dict[str, Any]:
        is_reading = self._sender is not None and self._sender.is_reading(RequestKey.numbered(number))
        return {"num_left": len(self._left), "is_reading": is_reading, "failure_seen": self._failure}

    def close(self) -> None:
        """The sender stays, closed, to be asked what it still reads."""
        self._left.clear()
        if self._sender is not None:
            self._sender.close()


def found_transport(spec: Spec) -> Transport:
    """The one that a test names."""
    transport: Transport = resolve_name(spec.transport)
    return transport


def open_site(spec: Spec, stack: contextlib.ExitStack) -> Site:
    """A pool in shared memory, and what else an end is given by a node."""
    segment = Segment(spec.num_blocks * spec.block_bytes)
    stack.callback(segment.close)
    pool = HostPool(segment.array.reshape(spec.num_blocks, spec.block_bytes))
    return Site(pool, _context(spec, stack), spec.host, spec.links, segment=segment)


def _context(spec: Spec, stack: contextlib.ExitStack) -> zmq.Context[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(context.destroy, linger=0)
    authenticator = start_authenticator(context, spec.links.cluster_key)
    if authenticator is not None:
        stack.callback(authenticator.stop)
    return context


@contextlib.contextmanager
def open_end(role: str, spec: Spec) -> Iterator[ReceiverEnd | SenderEnd]:
    """An end in this process."""
    with contextlib.ExitStack() as stack:
        yield ReceiverEnd(spec, stack) if role == "receiver" else SenderEnd(spec, stack)


def answer_to(end: ReceiverEnd | SenderEnd, command: dict[str, Any]) -> dict[str, Any]:
    """Do one command: {"do": name of a method, argument: value, ...}."""
    arguments = dict(command)
    method = getattr(end, arguments.pop("do"))
    try:
        return {"result": method(**arguments)}
    except BatonError as error:
        return {"failure": error.message}


def run_end(control: socket.socket, role: str, spec: Spec) -> None:
    """Until the other end of the socket is closed."""
    lines = control.makefile("rwb", buffering=0)
    with open_end(role, spec) as end:
        while True:
            is_busy = end.work()
            poller = zmq.Poller()
            for source in (control, *end.wait_on()):
                poller.register(source, zmq.POLLIN)
            if control.fileno() not in dict(poller.poll(1 if is_busy else 20)):
                continue
            line = lines.readline()
            if not line:
                return
            lines.write(json.dumps(answer_to(end, json.loads(line))).encode() + b"\n")


def fork_end(requests: socket.socket, control: socket.socket, role: str, spec: Spec) -> int:
    """The id of a new process that runs an end and nothing else."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        requests.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        run_end(control, role, spec)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def main() -> None:
    """Start ends until the test hangs up."""
    if find_spec("torch") is not None:
        importlib.import_module("torch")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        requests.sendall(b"ready")
        while True:
            request, descriptors, *_ = socket.recv_fds(requests, 2**16, 1)
            if not request:
                return
            role, *fields = json.loads(request)
            with socket.socket(fileno=descriptors[0]) as control:
                pid = fork_end(requests, control, role, Spec(*fields))
            requests.sendall(str(pid).encode())


if __name__ == "__main__":
    main()
