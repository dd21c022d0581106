"""Liars at what processes of one host share: segments that are pools, and rings of slots."""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import replace
from pathlib import Path

import numpy as np
import zmq

from baton.kvtransfer.messages import Endpoint, HandoffName
from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.transports.base import Move
from baton.kvtransfer.transports.shm import slots_wire
from baton.kvtransfer.transports.shm.direct import ShmSender
from baton.kvtransfer.transports.shm.segment import FOLDER, Segment
from baton.kvtransfer.transports.shm.slots_wire import RingEnd, SlotBatch
from baton.wire.request_key import RequestKey
from tests.kvtransfer.liars.liars import Liars
from tests.kvtransfer.test_wire_fuzz import Forge
from tests.kvtransfer.transports.shm import slots_ends
from tests.request_keys import key_of

_GENERATION = 3
Context = zmq.Context[zmq.Socket[bytes]]


class AtSharedMemory(Liars):
    """P, to which a decode node names what is no pool of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._source = np.random.default_rng(seed).integers(0, 256, (16, 4096), dtype=np.uint8)
        self._good = Segment(16 * 4096)

    def lie(self) -> None:
        """A name that leads to something else, or a file that changes under the mapping."""
        path = FOLDER / f"baton-{secrets.token_hex(16)}"
        try:
            sender = ShmSender(Endpoint("shm", self._plant(path)), self._source, 16)
            self._change(path)
            self.timed(lambda: sender.push(RequestKey.numbered(1), [Move(0, 0, 15, 1), Move(1, 3, 2, 1)]))
            sender.push_part(RequestKey.numbered(1), [Move(0, 5, 9, 1)], 64, 128)
            sender.close()
        finally:
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    def _plant(self, path: Path) -> str:
        chance = self.chance
        what = chance.choice(("nothing", "size", "holes", "link", "fifo", "folder", "right", "right", "name"))
        if what in ("size", "right"):
            num_bytes = 16 * 4096 if what == "right" else chance.choice((0, 1, 4096, 16 * 4096 - 1, 17 * 4096))
            path.write_bytes(bytes(num_bytes))
        elif what == "holes":
            path.touch()
            os.truncate(path, 16 * 4096)
        elif what == "link":
            path.symlink_to(chance.choice((FOLDER / self._good.name, Path("/etc/passwd"), path)))
        elif what == "fifo":
            os.mkfifo(path)
        elif what == "folder":
            path.mkdir()
        odd_names = (
            "",
            "baton-",
            "../" + self._good.name,
            f"/dev/shm/{self._good.name}",
            self._good.name.upper(),
            "\0",
        )
        return chance.choice(odd_names) if what == "name" else path.name

    def _change(self, path: Path) -> None:
        what = self.chance.choice(("nothing", "cut", "unlink", "grow", "swap"))
        if what in ("cut", "grow"):
            os.truncate(path, self.chance.choice((0, 4096)) if what == "cut" else 2**30)
        elif what != "nothing":
            path.unlink()
            if what == "swap":
                path.symlink_to(FOLDER / self._good.name)

    def do_good(self) -> None:
        """Another decode node's pool."""
        blocks = self._good.array.reshape(16, 4096)
        blocks[:] = 0
        sender = ShmSender(Endpoint("shm", self._good.name), self._source, 16)
        sender.push(RequestKey.numbered(2), [Move(place, place, place, 1) for place in range(8)])
        sender.close()
        assert (blocks[:8] == self._source[:8]).all()
        assert not blocks[8:].any(), "a block that nobody pushed was written"

    def close(self) -> None:
        """See `Liars`."""
        self._good.close()


class AtSlots(Liars):
    """D, with rings of prefill nodes that lie."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._context: Context = zmq.Context()
        self._target = slots_ends.Target(self._context, HostPool)
        source = np.random.default_rng(seed).integers(0, 256, self._target.blocks.shape, dtype=np.uint8)
        self._source = source
        self._sending = slots_ends.Sending(self._context, self._target, HostPool(source), 8)
        self._forge = Forge(slots_wire.TO_RECEIVER, self.chance)
        self._peer: slots_ends.Peer | None = None

    def lie(self) -> None:
        """A message of a peer that has a ring of its own, which it may change."""
        chance = self.chance
        if self._peer is None or chance.random() < 0.1:
            self._leave()
            self._peer = slots_ends.Peer(self._context, self._target)
            self._peer.say(self._peer.hello)
        peer = self._peer
        roll = chance.random()
        if roll < 0.05:
            os.truncate(FOLDER / peer.ring.name, chance.choice((0, 4096, 2**20)))
        peer.socket.send_multipart(self._frames(peer), zmq.NOBLOCK)
        self.timed(self._target.receiver.poll)

    def _frames(self, peer: slots_ends.Peer) -> list[bytes]:
        chance = self.chance
        if chance.random() < 0.5:
            return [chance.choice((self._forge.damaged, self._forge.forged))()] * chance.choice((1, 1, 2))
        blocks = tuple(chance.randrange(20) for _ in range(chance.choice((0, 1, 2, 3, 1024))))
        batch = SlotBatch(
            number=chance.choice((0, 0, 1, 2, 2**62)),
            slot=chance.choice((0, 3, 4, 1023)),
            handoff=HandoffName(*RequestKey.numbered(chance.choice((1, 2, 3)))),
            first_index=chance.choice((0, 1, 2**40)),
            block_ids=blocks,
            generations=(_GENERATION,) * chance.choice((len(blocks), 0, 1)),
        )
        other = replace(peer.hello, num_slots=chance.choice((1, 4, 1024)), slot_blocks=chance.choice((1, 2, 1024)))
        message = chance.choice((batch, batch, batch, other, replace(peer.hello, block_bytes=2**40), RingEnd("x")))
        return [slots_wire.TO_RECEIVER.encode(message)]

    def do_good(self) -> None:
        """A real sender fills blocks 6 and 7."""
        target, key = self._target, key_of(1)
        target.blocks[6:8] = slots_ends.GUARD
        assert target.is_untouched, "a block that nobody granted was written"
        target.receiver.expect(key, (6, 7), (_GENERATION, _GENERATION))
        self._sending.push(4, 5)
        slots_ends.until(lambda: sum(count for _, count in target.arrived()) == 2)
        target.receiver.forget(key)
        assert (target.blocks[6:8] == self._source[4:6]).all()

    def _leave(self) -> None:
        if self._peer is not None:
            with contextlib.suppress(OSError):
                self._peer.close()
            self._peer = None

    def close(self) -> None:
        """See `Liars`."""
        self._leave()
        self._sending.sender.close()
        self._target.receiver.close()
        self._context.destroy(linger=0)
