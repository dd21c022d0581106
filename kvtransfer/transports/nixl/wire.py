"""What the nixl transport says: to its agent process, to the other node's agent, and in endpoints.

Owns three vocabularies and the stream between a node and its agent. Knows no processes and not nixl.

- `COMMANDS` and `REPORTS` travel between a node and its agent, over a socket pair: u32 length, little endian, then one
  `Codec` envelope.
- `NOTICES` travel with the bytes from agent to agent: a write is followed by the `Landed` that names its blocks.
- `DETAILS` are the details of an `Endpoint`.

Invariant: nothing that does not decode goes any further; what a peer sent costs at most that notice.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Annotated, Any

from baton.kvtransfer.messages import HandoffName, ProcessIdentity
from baton.wire.codec import MAX_MESSAGE_BYTES, U32, U64, BlockIds, Bounds, Codec, Length, U64s
from baton.wire.errors import BatonError
from baton.wire.kv_shard import KvShard

NAME = "nixl"
MAX_NOTICE_BYTES = 32_000
MAX_NOTICES = 256
MAX_METADATA_BYTES = 60_000
_Name = Annotated[str, Length(256)]
_Text = Annotated[str, Length(1024)]
_Metadata = Annotated[bytes, Length(MAX_METADATA_BYTES)]
_Notice = Annotated[bytes, Length(MAX_NOTICE_BYTES)]
_LENGTH = struct.Struct("<I")
_CHUNK_BYTES = 2**18
_MAX_CHUNKS = 16


@dataclass(frozen=True, slots=True)
class PoolDetails:
    """The details of an endpoint: what nixl needs to reach an agent, and where the pool lies in that agent's memory.
    That is "DRAM" of the host, or "VRAM" of the GPU with this number there."""

    metadata: _Metadata
    base_address: U64
    num_bytes: Annotated[int, Bounds(1, 2**48)]
    memory: Annotated[str, Length(8)]
    device_index: Annotated[int, Bounds(0, 1023)]


@dataclass(frozen=True, slots=True)
class Landed:
    """Agent to agent, behind the bytes: these blocks of a grant were written, `first_index` and following. `source`:
    what this rank has of them; None: all of them."""

    handoff: HandoffName
    first_index: Annotated[int, Bounds(0, 2**40)]
    block_ids: BlockIds
    generations: U64s
    source: KvShard | None = None


@dataclass(frozen=True, slots=True)
class Watch:
    """Node -> agent: notices are expected from now on (look often), or not."""

    is_expecting: bool


@dataclass(frozen=True, slots=True)
class Connect:
    """Node -> agent: prepare writes into the pool of another agent. Answered by `PeerEnded` when that fails.

    `sources`, `targets`, `sizes`: the runs of bytes that a write of a block consists of, as offsets in a block here and
    in one there. None: blocks are written as they are.
    """

    peer_id: U32
    agent_name: _Name
    details: PoolDetails
    num_blocks: U32
    sources: U64s = ()
    targets: U64s = ()
    sizes: U64s = ()


@dataclass(frozen=True, slots=True)
class Write:
    """Node -> agent: write own blocks `sources` over the peer's blocks `targets`, then deliver `notice`.

    Answered by `WriteEnded`.
    """

    peer_id: U32
    write_id: U64
    sources: BlockIds
    targets: BlockIds
    notice: _Notice


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Node -> agent: no more writes for this peer. Answered by `PeerEnded` once none is in flight."""

    peer_id: U32


@dataclass(frozen=True, slots=True)
class Ready:
    """Agent -> node, first: what this agent is called and how others reach it."""

    agent_name: _Name
    process: ProcessIdentity
    details: PoolDetails


@dataclass(frozen=True, slots=True)
class WriteEnded:
    """Agent -> node: nothing of this write is read any more. With an empty `error` it has landed; with another it may
    have landed in part, unless it never began.
    """

    write_id: U64
    has_begun: bool
    error: _Text


@dataclass(frozen=True, slots=True)
class PeerEnded:
    """Agent -> node: this peer is forgotten, because of `error` or because it was asked for."""

    peer_id: U32
    error: _Text


@dataclass(frozen=True, slots=True)
class Notices:
    """Agent -> node: what other agents sent behind their writes, as it came."""

    notices: Annotated[tuple[_Notice, ...], Length(MAX_NOTICES)]


COMMANDS = Codec(Watch, Connect, Write, Disconnect)
REPORTS = Codec(Ready, WriteEnded, PeerEnded, Notices)
NOTICES = Codec(Landed)
DETAILS = Codec(PoolDetails)


class Channel:
    """One end of the socket pair between a node and its agent. It never blocks: bytes that do not fit wait for `flush`,
    `num_waiting_bytes` of them.

    `is_open` turns False when the other end is gone or sent something that cannot be; both mean the same to its owner.
    """

    def __init__(self, end: socket.socket, sends: Codec, receives: Codec) -> None:
        end.setblocking(False)
        self.socket = end
        self.is_open = True
        self._sends = sends
        self._receives = receives
        self._incoming = bytearray()
        self._outgoing = bytearray()

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes that were sent but have not left."""
        return len(self._outgoing)

    def send(self, message: object) -> None:
        """Queue a message and send what fits."""
        envelope = self._sends.encode(message)
        self._outgoing += _LENGTH.pack(len(envelope)) + envelope
        self.flush()

    def flush(self) -> None:
        """Send as much of what waits as the socket takes."""
        try:
            while self._outgoing and self.is_open:
                del self._outgoing[: self.socket.send(self._outgoing[:_CHUNK_BYTES])]
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False

    def receive(self) -> list[Any]:
        """The messages that have come, a few MiB at most. The last ones before the end of the connection count too."""
        self._fill()
        messages = []
        while (envelope := self._next_envelope()) is not None:
            try:
                messages.append(self._receives.decode(envelope))
            except BatonError:
                self.is_open = False
                break
        return messages

    def close(self) -> None:
        """Close this end of the socket pair."""
        self.is_open = False
        self.socket.close()

    def _fill(self) -> None:
        try:
            for _ in range(_MAX_CHUNKS):
                if not self.is_open:
                    return
                chunk = self.socket.recv(_CHUNK_BYTES)
                self._incoming += chunk
                self.is_open = bool(chunk)
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False

    def _next_envelope(self) -> bytes | None:
        if len(self._incoming) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._incoming)
        if length > MAX_MESSAGE_BYTES + 64:
            self.is_open = False
            return None
        end = _LENGTH.size + length
        if len(self._incoming) < end:
            return None
        envelope = bytes(self._incoming[_LENGTH.size : end])
        del self._incoming[:end]
        return envelope
