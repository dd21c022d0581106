"""Passages: how a rank hands the residual stream of a step to the rank of the same place in the next stage.

Owns the memory that both ranks map, and a pair of sockets. The sender writes the stream into the next slot and says how
many tokens it has; the receiver waits for that word. Nothing is said back: there are as many slots as steps may be in
flight, so the step that used a slot before has been computed by the driver, and all ranks, when its slot is used again.

Invariants: steps come in the order of their orders; a wait has a deadline, and ends at once when the other rank does.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from device.base import STEP_TIMEOUT_S
from engine.executor.world import RanksLost
from engine.models.shard import Shard
from engine.runner.kv_memory import ByteArray, SharedRegion, allocate_shared

_WORD = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class StreamShape:
    """The residual stream of the largest step, [max_tokens, hidden_size], in a model of `num_stages` stages."""

    max_tokens: int
    hidden_size: int
    dtype: torch.dtype
    num_stages: int

    @property
    def num_bytes(self) -> int:
        """Of all slots of a passage."""
        return self.num_stages * self.max_tokens * self.hidden_size * self.dtype.itemsize

    def slots(self, memory: ByteArray) -> Tensor:
        """[num_stages, max_tokens, hidden_size] in the memory of a passage."""
        return torch.from_numpy(memory).view(self.dtype).view(self.num_stages, self.max_tokens, self.hidden_size)


class Outgoing:
    """The sender's end. `slots`: see `StreamShape`."""

    def __init__(self, end: socket.socket, slots: Tensor, timeout_s: float = STEP_TIMEOUT_S) -> None:
        self._end, self._slots, self._next = end, slots, 0
        end.settimeout(timeout_s)

    def send(self, stream: Tensor) -> None:
        """Hand on the residual stream [T, E] of a step. Raises `RanksLost`."""
        self._slots[self._next][: len(stream)].copy_(stream)
        self._next = (self._next + 1) % len(self._slots)
        try:
            self._end.sendall(_WORD.pack(len(stream)))
        except OSError as error:
            raise RanksLost(f"the next stage takes no step: {error}") from None

    def close(self) -> None:
        """The receiver learns of it."""
        self._end.close()


class Incoming:
    """The receiver's end. `slots`: see `StreamShape`."""

    def __init__(self, end: socket.socket, slots: Tensor, timeout_s: float = STEP_TIMEOUT_S) -> None:
        self._end, self._slots, self._next = end, slots, 0
        end.settimeout(timeout_s)

    def receive(self, num_tokens: int) -> Tensor:
        """The residual stream [T, E] of the next step, which is that of `num_tokens` tokens; valid until as many steps
        were received as there are slots. Raises `RanksLost`."""
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
        """The sender learns of it."""
        self._end.close()


@dataclass(frozen=True, slots=True)
class _Passage:
    sender: socket.socket
    receiver: socket.socket
    memory: SharedRegion


class Passages:
    """All passages of a node with `size` ranks in a stage, as its driver opens them. Raises `InvalidSetting` where the
    system has no memory for them."""

    def __init__(self, size: int, stream: StreamShape) -> None:
        self._stream = stream
        self._from = {
            (stage, rank): _Passage(*socket.socketpair(), allocate_shared(stream.num_bytes))
            for stage in range(stream.num_stages - 1)
            for rank in range(size)
        }

    def descriptors_of(self, shard: Shard) -> list[int]:
        """What `taken_ends` takes, in its order."""
        found = []
        if not shard.is_first_stage:
            passage = self._from[shard.stage - 1, shard.rank]
            found += [passage.receiver.fileno(), passage.memory.descriptor]
        if not shard.is_last_stage:
            passage = self._from[shard.stage, shard.rank]
            found += [passage.sender.fileno(), passage.memory.descriptor]
        return found

    def incoming(self) -> Incoming:
        """The end of the driver itself."""
        own = self._from[self._stream.num_stages - 2, 0]
        return Incoming(own.receiver.dup(), self._stream.slots(own.memory.array))

    def close(self) -> None:
        """Close what other processes have, so that they notice each other's end."""
        for passage in self._from.values():
            passage.sender.close()
            passage.receiver.close()
            os.close(passage.memory.descriptor)


def taken_ends(shard: Shard, stream: StreamShape, take: Callable[[], int]) -> tuple[Incoming | None, Outgoing | None]:
    """The ends of the passages of a rank that is not the driver. `take`: its next descriptor."""

    def end() -> tuple[socket.socket, Tensor]:
        connected = socket.socket(fileno=take())
        descriptor = take()
        try:
            memory: ByteArray = np.frombuffer(mmap.mmap(descriptor, stream.num_bytes), dtype=np.uint8)
        finally:
            os.close(descriptor)
        return connected, stream.slots(memory)

    incoming = None if shard.is_first_stage else Incoming(*end())
    outgoing = None if shard.is_last_stage else Outgoing(*end())
    return incoming, outgoing
