"""Passages: how a rank hands the residual stream of a step to the rank of the same place in the next stage.

Owns the memory that both ranks map, and a pair of sockets. The sender writes the stream into the next slot and says how
many tokens it has; the receiver waits for that word. Nothing is said back: there are as many slots as steps may be in
flight, so the step that used a slot before has been computed by the driver, and all ranks, when its slot is used again.
To a rank of another machine the stream goes over a world of two instead; as many steps are on their way there at most.
So it does from device to device: each end is one more operation on its engine's stream there, and nothing waits in it.

Invariants: steps come in the order of their orders; a wait has a deadline, and ends at once when the other rank does.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from baton.device.base import STEP_TIMEOUT_S
from baton.engine.executor.base import StreamShape
from baton.engine.models.shard import Shard
from baton.engine.runner.kv_memory import ByteArray, SharedRegion, allocate_shared
from baton.ranks.executor.world import Pairs, RanksLost, World

NO_PAIRS = Pairs(None, None)
_WORD = struct.Struct("<I")


class Outgoing(Protocol):
    """The sender's end of a passage."""

    def send(self, stream: Tensor) -> None:
        """Hand on the residual stream [T, E] of a step. Raises `RanksLost`."""
        ...

    def close(self) -> None:
        """Close this end; the receiver notices."""
        ...


class Incoming(Protocol):
    """The receiver's end of a passage."""

    @property
    def place(self) -> Tensor | None:
        """The memory [max_tokens, E] in whose begin every stream is received; None: there are several such places."""
        ...

    def receive(self, num_tokens: int) -> Tensor:
        """The residual stream [T, E] of the next step, which has `num_tokens` tokens. It is valid until as many steps
        were received as there are stages. Raises `RanksLost`."""
        ...

    def close(self) -> None:
        """Close this end; the sender notices."""
        ...


class DistantOutgoing:
    """The sender's end of a passage to another machine, over a world of both ends."""

    def __init__(self, pair: World, stream: StreamShape) -> None:
        self._pair, self._most = pair, stream.num_stages
        self._under_way: deque[Callable[[], None]] = deque()

    def send(self, stream: Tensor) -> None:
        """Begin to send a copy of `stream` [T, E]. Waits only when as many are under way as there are stages."""
        self._under_way.append(self._pair.begin_send(stream.clone(memory_format=torch.contiguous_format)))
        while len(self._under_way) > self._most:
            self._under_way.popleft()()

    def close(self) -> None:
        """Do nothing: the connection ends with the process."""


class DistantIncoming:
    """The receiver's end of a passage from another machine, over a world of both ends."""

    place = None

    def __init__(self, pair: World, stream: StreamShape) -> None:
        self._pair, self._stream = pair, stream

    def receive(self, num_tokens: int) -> Tensor:
        """Receive [num_tokens, E] into new memory. Raises `RanksLost`."""
        received = torch.empty(num_tokens, self._stream.hidden_size, dtype=self._stream.dtype)
        self._pair.receive(received)
        return received

    def close(self) -> None:
        """Do nothing: the connection ends with the process."""


class DeviceOutgoing:
    """The sender's end of a passage between two GPUs, over a world in which the sender is first."""

    def __init__(self, pair: World) -> None:
        self._pair = pair

    def send(self, stream: Tensor) -> None:
        """Issue the transfer of `stream` [T, E]. Work that is issued later may overwrite the stream."""
        self._pair.from_first(stream.contiguous().view(torch.uint8))  # as bytes: they are only moved

    def close(self) -> None:
        """Do nothing: the connection ends with the process."""


class DeviceIncoming:
    """The receiver's end of a passage between two GPUs. A stream is valid until the next one is received."""

    def __init__(self, pair: World, stream: StreamShape) -> None:
        self._pair = pair
        self.place = torch.zeros(stream.max_tokens, stream.hidden_size, dtype=stream.dtype, device=stream.device)

    def receive(self, num_tokens: int) -> Tensor:
        """Issue the receipt of [num_tokens, E] into `place`, and return the view."""
        received = self.place[:num_tokens]
        self._pair.from_first(received.view(torch.uint8))
        return received

    def close(self) -> None:
        """Do nothing: the connection ends with the process."""


class SharedOutgoing:
    """The sender's end of a passage in memory that both ranks map. `slots`: see `StreamShape`."""

    def __init__(self, end: socket.socket, slots: Tensor, timeout_s: float = STEP_TIMEOUT_S) -> None:
        self._end, self._slots, self._next = end, slots, 0
        end.settimeout(timeout_s)

    def send(self, stream: Tensor) -> None:
        """Write `stream` [T, E] into the next slot, and send the number of its tokens. Raises `RanksLost`."""
        self._slots[self._next][: len(stream)].copy_(stream)
        self._next = (self._next + 1) % len(self._slots)
        try:
            self._end.sendall(_WORD.pack(len(stream)))
        except OSError as error:
            raise RanksLost(f"the next stage takes no step: {error}") from None

    def close(self) -> None:
        """Close the socket, which the receiver notices."""
        self._end.close()


class SharedIncoming:
    """The receiver's end of a passage in memory that both ranks map. `slots`: see `StreamShape`."""

    place = None

    def __init__(self, end: socket.socket, slots: Tensor, timeout_s: float = STEP_TIMEOUT_S) -> None:
        self._end, self._slots, self._next = end, slots, 0
        end.settimeout(timeout_s)

    def receive(self, num_tokens: int) -> Tensor:
        """Wait for the next slot; return its rows [num_tokens, E]. Raises `RanksLost` when another number of tokens
        comes."""
        try:
            word = self._end.recv(_WORD.size)
        except OSError as error:  # a wait that was too long, too
            raise RanksLost(f"the stage before hands no step on: {error}") from None
        if word != _WORD.pack(num_tokens):
            reason = "is gone" if len(word) < _WORD.size else "computes another step"
            raise RanksLost(f"the stage before {reason}")
        slot, self._next = self._slots[self._next], (self._next + 1) % len(self._slots)
        return slot[:num_tokens]

    def close(self) -> None:
        """Close the socket, which the sender notices."""
        self._end.close()


@dataclass(frozen=True, slots=True)
class _Passage:
    sender: socket.socket
    receiver: socket.socket
    memory: SharedRegion


class Passages:
    """All passages of a node that are shared memory, as its driver opens them. Each leads from a rank of `senders` to
    the rank of the same place in the next stage. Raises `InvalidSetting` where the system has no memory for them."""

    def __init__(self, senders: Iterable[Shard], stream: StreamShape) -> None:
        self._stream = stream
        self._from = {
            (shard.stage, shard.rank): _Passage(*socket.socketpair(), allocate_shared(stream.num_bytes))
            for shard in senders
            if not shard.is_last_stage
        }

    def descriptors_of(self, shard: Shard) -> list[int]:
        """The descriptors for `taken_ends`, in its order."""
        found = []
        if (before := self._from.get((shard.stage - 1, shard.rank))) is not None:
            found += [before.receiver.fileno(), before.memory.descriptor]
        if (own := self._from.get((shard.stage, shard.rank))) is not None:
            found += [own.sender.fileno(), own.memory.descriptor]
        return found

    def incoming(self) -> SharedIncoming:
        """The driver's own end: the stream of the stage before."""
        own = self._from[self._stream.num_stages - 2, 0]
        return SharedIncoming(own.receiver.dup(), self._stream.slots(own.memory.array))

    def close(self) -> None:
        """Close what other processes have, so that they notice each other's end."""
        for passage in self._from.values():
            passage.sender.close()
            passage.receiver.close()
            os.close(passage.memory.descriptor)


class PassageEnds(NamedTuple):
    """The ends that a rank has: `incoming` from the stage before, None in the first; `outgoing` to the next stage, None
    in the last."""

    incoming: Incoming | None = None
    outgoing: Outgoing | None = None


NO_PASSAGES = PassageEnds()
"""Of a rank in the only stage."""


def taken_ends(shard: Shard, stream: StreamShape, take: Callable[[], int], pairs: Pairs = NO_PAIRS) -> PassageEnds:
    """The ends of the passages of a rank that is not the driver. `take`: its next descriptor; `pairs`: those without
    shared memory."""

    def end() -> tuple[socket.socket, Tensor]:
        connected = socket.socket(fileno=take())
        descriptor = take()
        try:
            memory: ByteArray = np.frombuffer(mmap.mmap(descriptor, stream.num_bytes), dtype=np.uint8)
        finally:
            os.close(descriptor)
        return connected, stream.slots(memory)

    incoming: Incoming | None = None
    outgoing: Outgoing | None = None
    if not shard.is_first_stage:
        incoming = SharedIncoming(*end()) if pairs.before is None else incoming_from(pairs.before, stream)
    if not shard.is_last_stage:
        outgoing = SharedOutgoing(*end()) if pairs.next is None else _outgoing_to(pairs.next, stream)
    return PassageEnds(incoming, outgoing)


def incoming_from(pair: World, stream: StreamShape) -> Incoming:
    """The receiver's end of a passage without memory that both ranks map."""
    return DistantIncoming(pair, stream) if stream.device is None else DeviceIncoming(pair, stream)


def _outgoing_to(pair: World, stream: StreamShape) -> Outgoing:
    return DistantOutgoing(pair, stream) if stream.device is None else DeviceOutgoing(pair)
