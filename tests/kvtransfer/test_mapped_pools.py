"""Pools that a writer maps for itself (CUDA IPC): blocks of a broken handoff need two proofs, the end of the receiver's
own agent, and the writer's word or its end.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.kvtransfer.incoming import FENCE_AFTER_S
from baton.kvtransfer.messages import PeerWelcome, Revoked
from baton.kvtransfer.process_identity import this_process
from baton.kvtransfer.write_proof import WriteProof
from tests.kvtransfer.loopback import Fault
from tests.kvtransfer.pools import key_of
from tests.kvtransfer.wire import TRANSIT_S
from tests.kvtransfer.world import Kind, World, patches

KEY = key_of(1)


class Mapped:
    """A world whose receiver cannot stop its writers by its own end alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = World(Kind.RDMA)
        for target, value in patches(self.world).items():
            monkeypatch.setattr(target, value)
        self.fenced_s: list[float] = []
        receiver = self.world.receiver
        receiver.write_proof = WriteProof.BOTH_ENDED
        end_of_life = receiver.fence

        def fence() -> bool:
            self.fenced_s.append(self.world.wire.now_s)
            end_of_life()
            return False

        monkeypatch.setattr(receiver, "fence", fence)

    def turns(self, count: int, duration_s: float = TRANSIT_S) -> None:
        for _ in range(count):
            self.world.turn(duration_s)
            self.world.check()

    def grant(self, num_tokens: int = 16) -> None:
        """A prompt is computed and granted, and nothing of it pushed."""
        world = self.world
        world.begin(KEY, num_tokens)
        world.grant(KEY, num_tokens)
        self.turns(5)
        world.compute(KEY, num_tokens)

    @property
    def is_held(self) -> bool:
        return KEY in self.world.decode_pool.held

    def end(self) -> None:
        self.world.quiesce()
        self.world.check()
        self.world.check_over()


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> Mapped:
    return Mapped(monkeypatch)


def test_a_silent_writer_keeps_its_blocks_quarantined_however_often_the_receiver_ends(mapped: Mapped) -> None:
    mapped.grant()
    mapped.world.is_prefill_frozen = True
    given_up_s = mapped.world.wire.now_s
    mapped.world.cancel_decode(KEY)
    mapped.turns(100, 1.0)
    assert mapped.is_held
    assert len(mapped.fenced_s) == 1, "its own agent is ended once"
    assert FENCE_AFTER_S <= mapped.fenced_s[0] - given_up_s < FENCE_AFTER_S + 1.5
    mapped.world.is_prefill_frozen = False  # and its word is enough
    mapped.turns(20)
    assert not mapped.is_held
    mapped.end()


def test_the_end_of_the_writer_is_no_proof_before_the_own_agent_has_ended(mapped: Mapped) -> None:
    mapped.grant()
    mapped.world.network.plan = lambda number, key, move: Fault(delay=10**6)
    mapped.world.push(1)
    mapped.turns(2)
    given_up_s = mapped.world.wire.now_s
    mapped.world.is_prefill_frozen = True
    mapped.world.dead.add(mapped.world.life.process)
    mapped.world.cancel_decode(KEY)
    while not mapped.fenced_s:
        assert mapped.is_held
        mapped.turns(1, 0.25)
    while mapped.is_held:
        mapped.turns(1, 0.25)
    assert FENCE_AFTER_S <= mapped.world.wire.now_s - given_up_s < FENCE_AFTER_S + 3
    mapped.world.restart_prefill_node()
    mapped.end()


def test_each_process_of_a_writer_has_to_end(mapped: Mapped) -> None:
    rank = replace(this_process(), pid=this_process().pid + 1)
    mapped.world.wire.rewrite = lambda message: [
        replace(message, writers=(*message.writers, rank)) if isinstance(message, PeerWelcome) else message
    ]
    mapped.grant()
    mapped.world.is_prefill_frozen = True
    mapped.world.dead.add(mapped.world.life.process)
    mapped.world.cancel_decode(KEY)
    mapped.turns(20, 1.0)
    assert mapped.is_held
    assert len(mapped.fenced_s) == 1
    mapped.world.dead.add(rank)
    while mapped.is_held:
        mapped.turns(1, 0.25)
    mapped.world.restart_prefill_node()
    mapped.end()


def test_a_writer_that_has_done_is_enough_once_the_own_agent_has_ended(mapped: Mapped) -> None:
    world, faults = mapped.world, [Fault(refusal="cable cut"), *[Fault(delay=200)] * 4]
    world.network.plan = lambda number, key, move: faults.pop() if faults else Fault()
    mapped.grant(32)
    world.push(2)
    world.finish(KEY)
    while mapped.is_held:
        mapped.turns(1, 0.1)
    assert len(mapped.fenced_s) == 1
    assert world.wire.now_s < FENCE_AFTER_S, "nobody waits for the timer"
    mapped.end()


def test_an_agent_that_ends_by_itself_fails_its_handoffs_and_frees_nothing(mapped: Mapped) -> None:
    mapped.grant()
    mapped.world.is_prefill_frozen = True
    mapped.world.receiver.fence()
    mapped.turns(20, 1.0)
    assert mapped.world.decode.num_quarantined_blocks == 4
    assert len(mapped.fenced_s) == 1
    mapped.world.is_prefill_frozen = False
    mapped.turns(20)
    assert not mapped.is_held
    mapped.end()


def test_who_cannot_see_this_process_has_not_mapped_its_memory(mapped: Mapped) -> None:
    elsewhere = replace(this_process(), host="another boot:another table:1")
    mapped.world.wire.rewrite = lambda message: [
        replace(message, writers=(elsewhere,)) if isinstance(message, PeerWelcome) else message
    ]
    mapped.grant()
    mapped.world.is_prefill_frozen = True
    mapped.world.cancel_decode(KEY)
    while mapped.is_held:
        mapped.turns(1, 0.25)
    assert len(mapped.fenced_s) == 1
    mapped.world.is_prefill_frozen = False
    mapped.end()


def test_what_may_still_land_is_fenced_whatever_the_peer_says_later(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(Kind.RDMA)
    for target, value in patches(world).items():
        monkeypatch.setattr(target, value)
    fence = world.receiver.fence
    monkeypatch.setattr(world.receiver, "fence", lambda: False)  # not now
    world.begin(KEY, 16)
    world.grant(KEY, 16)
    for _ in range(5):
        world.turn(TRANSIT_S)
    world.wire.rewrite = lambda message: [
        said
        for needs_fence in (True, False)
        for said in [replace(message, needs_fence=needs_fence) if isinstance(message, Revoked) else message]
    ]
    world.cancel_prefill(KEY, "cancelled")
    for _ in range(10):
        world.turn(1.0)
    assert KEY in world.decode_pool.held
    assert world.decode.num_quarantined_blocks == 4
    monkeypatch.setattr(world.receiver, "fence", fence)
    world.turn(TRANSIT_S)
    assert KEY not in world.decode_pool.held
    world.quiesce()
    world.check_over()
