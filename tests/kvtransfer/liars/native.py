"""Liars at the ends of transports that native libraries carry: pairs of nccl, and agents of nixl."""

from __future__ import annotations

import itertools
import secrets
import threading
import time

import zmq

from baton.kvtransfer.messages import Endpoint, HandoffName
from baton.kvtransfer.transports.nccl import wire as nccl_wire
from baton.kvtransfer.transports.nccl.wire import PairHello, StoreEntry
from baton.kvtransfer.transports.nixl.wire import DETAILS, NOTICES, Landed, PoolDetails
from baton.wire.errors import TransferFailed
from baton.wire.request_key import RequestKey
from tests.kvtransfer.liars.liars import Liars
from tests.kvtransfer.test_wire_fuzz import Forge
from tests.kvtransfer.transports.nccl import nccl_ends
from tests.kvtransfer.transports.nixl.nixl_pair import NixlPair, moves_of

Context = zmq.Context[zmq.Socket[bytes]]


class AtPairs(Liars):
    """D of the nccl transport: everything that is said before a group stands, but gloo's own addresses, which gloo
    believes. Nodes refuse to use it (`registry`)."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._context: Context = zmq.Context()
        self._target = nccl_ends.Target(self._context)
        self._good = self._target.sender()
        self._forge = Forge(nccl_wire.TO_RECEIVER, self.chance)
        self._link: zmq.Socket[bytes] | None = None
        self._numbers = itertools.count(1)

    def lie(self) -> None:
        """A message of a connection that has said a right hello, most of the time."""
        chance = self.chance
        if self._link is None or chance.random() < 0.05:
            self._leave()
            self._link = self._context.socket(zmq.DEALER)
            self._link.connect(self._target.receiver.endpoint.address)
            if chance.random() < 0.9:
                self._link.send(nccl_wire.TO_RECEIVER.encode(PairHello("gloo", nccl_ends.BLOCK_BYTES)))
        self._link.send(self._frame(), zmq.NOBLOCK)
        time.sleep(0.002)  # the threads of pairs need a turn
        self.timed(self._target.poll)

    def _frame(self) -> bytes:
        chance = self.chance
        if chance.random() < 0.3:
            return chance.choice((self._forge.damaged, self._forge.forged))()
        key = chance.choice(("nonce/0", "nonce/1", "gpu/0", "gpu/1", "", "x" * 256, chance.randbytes(4).hex()))
        value = chance.randbytes(chance.choice((0, 1, 16, 136, 4096)))
        return nccl_wire.TO_RECEIVER.encode(StoreEntry(key, value))

    def do_good(self) -> None:
        """A real sender pushes two blocks."""
        target, number = self._target, next(self._numbers)
        assert target.is_untouched(6, 7), "a block that nobody granted was written"
        target.expect(number, (6, 7))
        before = target.num_arrived
        target.push(self._good, number, nccl_ends.moves_of((1, 2), (6, 7)))
        target.until(lambda: target.num_arrived == before + 2)
        target.receiver.forget(nccl_ends.key_of(number))
        assert (target.blocks[6:8] == target.source[1:3]).all()

    def _leave(self) -> None:
        if self._link is not None:
            self._link.close(linger=0)
            self._link = None

    def close(self) -> None:
        """See `Liars`."""
        self._leave()
        self._good.close()
        self._target.receiver.close()
        for thread in threading.enumerate():
            if thread.name.startswith("kv-pair"):
                thread.join(30)
        self._context.destroy(linger=0)


class AtAgents(Liars):
    """Both agents of the nixl transport: metadata and addresses in endpoints, and notices."""

    _BLOCKS, _BLOCK_BYTES = 16, 4096

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._pair = NixlPair(self._BLOCKS, self._BLOCK_BYTES)
        self._sender = self._pair.open()
        self._forge = Forge(NOTICES, self.chance)
        self._num_ended = 0

    @property
    def _num_lives_ended(self) -> int:
        """Agents that crashed, and those that were replaced because they had connected so often."""
        return self._pair.receiver._agent.num_lives_ended + self._pair.senders._agent.num_lives_ended

    @property
    def num_crashes(self) -> int:
        """Agents that what was said has ended."""
        return self._pair.receiver.num_crashes + self._pair.senders.num_crashes

    def lie(self) -> None:
        """An endpoint to open a sender for, or a notice."""
        if self.chance.random() < 0.5:
            self._mislead()
        else:
            for _ in range(20):
                self._pair.receiver._take(self._notice())
        self.timed(self._pair.receiver.poll)
        self.timed(self._pair.senders.poll)

    def _mislead(self) -> None:
        chance, endpoint = self.chance, self._pair.receiver.endpoint
        if not endpoint.details:
            return
        details: PoolDetails = DETAILS.decode(endpoint.details)
        name = chance.choice((endpoint.address, endpoint.address, secrets.token_hex(16), "x"))
        lied = PoolDetails(
            self._metadata(details.metadata, endpoint.address, name),
            chance.choice((details.base_address, details.base_address + 2**40, 0, 2**64 - 1)),
            chance.choice((details.num_bytes, details.num_bytes, 1, 2**48)),
            chance.choice((details.memory, details.memory, "VRAM", "x")),
            chance.choice((0, 0, 1023)),
        )
        try:
            stranger = self._pair.senders.open(Endpoint("nixl", name, DETAILS.encode(lied)), self._BLOCKS)
        except TransferFailed as error:
            self.refused[str(error)] += 1
            return
        for _ in range(5):
            time.sleep(0.001)
            self.timed(self._pair.senders.poll)
        stranger.close()

    def _metadata(self, right: bytes, address: str, name: str) -> bytes:
        """The good peer's, damaged; half of the time with the name that is claimed for it."""
        chance = self.chance
        metadata = bytearray(right.replace(address.encode(), name.encode()) if chance.random() < 0.5 else right)
        for _ in range(chance.choice((0, 1, 1, 4))):
            metadata[chance.randrange(len(metadata))] ^= 1 << chance.randrange(8)
        if chance.random() < 0.3:
            del metadata[chance.randrange(len(metadata)) :]
        return bytes(metadata)

    def _notice(self) -> bytes:
        chance = self.chance
        if chance.random() < 0.5:
            return chance.choice((self._forge.damaged, self._forge.forged))()
        blocks = tuple(chance.randrange(self._BLOCKS + 2) for _ in range(chance.choice((0, 1, 2, 4096))))
        handoff = HandoffName(*RequestKey.numbered(chance.randrange(8)))
        return NOTICES.encode(Landed(handoff, chance.choice((0, 1, 2**40)), blocks, blocks))

    def do_good(self) -> None:
        """A good peer writes four blocks; anew when what the liars said has ended an agent, and only then."""
        pair = self._pair
        moves = moves_of(range(4), range(4, 8))
        pair.target[:] = 0
        try:
            assert pair.push(self._sender, pair.expect(moves), moves) == 4
        except TransferFailed as error:
            if self._num_lives_ended == self._num_ended:
                raise AssertionError(f"a good handoff failed although both agents live: {error}") from None
            self.refused["a good sender had to connect anew, because an agent had ended"] += 1
            self._sender.close()
            self._sender = pair.open()
            assert pair.push(self._sender, pair.expect(moves), moves) == 4
        self._num_ended = self._num_lives_ended
        assert (pair.target[4:8] == pair.source[:4]).all()
        assert not pair.target[:4].any(), "a block that nobody granted was written"
        assert not pair.target[8:].any(), "a block that nobody granted was written"

    def close(self) -> None:
        """See `Liars`."""
        self._pair.close()
