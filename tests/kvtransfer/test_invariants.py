"""The invariants of a handoff under whatever can happen to it, in every order that hypothesis thinks of.

Each rule is one thing that happens: to a prompt, to a request, to a node, or to one message or block on its way. What
must hold is checked when it happens and after every rule (see `world`); after the last one everything is healed, time
passes, and nothing may be left.

A larger run, with other schedules each time (of each kind so many):
`BATON_SCHEDULES=3000 python -m pytest -o timeout=0 tests/kvtransfer/test_invariants.py`
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from baton.engine.cache.block_pool import NoFreeBlocks
from baton.kvtransfer.messages import (
    Commit,
    Grant,
    PeerHello,
    PeerRefusal,
    PeerWelcome,
    Pushed,
    Release,
    Renew,
    Resend,
    Revoke,
    Revoked,
)
from baton.kvtransfer.receiving import ReceivingSide
from baton.kvtransfer.sending import SendingSide
from baton.kvtransfer.thread import TransferThread
from baton.kvtransfer.transports.base import Move
from baton.wire.messages.legs import PrefillPeer
from baton.wire.request_key import RequestKey
from tests.kvtransfer.loopback import Fault
from tests.kvtransfer.pair import (
    MEMORY,
    NUM_BLOCKS,
    RECEIVER_EPOCH,
    DecodeNode,
    PrefillNode,
    open_pair,
    receiving_facts,
    sending_facts,
)
from tests.kvtransfer.pools import BLOCK_SIZE, LEASE_S, key_of
from tests.kvtransfer.wire import TRANSIT_S
from tests.kvtransfer.world import NUM_LAYERS, Kind, World, patches

KEY = key_of(1)
_MESSAGES = (Grant, Commit, Release, Revoke, Revoked, Renew, Resend, Pushed, PeerHello, PeerWelcome, PeerRefusal)
_FATES = {
    "lost": (),
    "doubled": (TRANSIT_S, TRANSIT_S),
    "doubled late": (TRANSIT_S, 2.0),
    "late": (0.5,),
    "last": (4.0,),
}
_FAULTS = {
    "flipped": Fault(flipped_bits=(77,)),
    "cut": Fault(num_cut_bytes=5),
    "lost": Fault(num_copies=0),
    "doubled": Fault(num_copies=2),
    "late": Fault(delay=3),
    "very late": Fault(delay=40),
    "refused": Fault(refusal="cable cut"),
}
_MAX_TOKENS = 23
_COUNT = st.integers(min_value=0, max_value=10**6)

LARGE_RUN = int(os.environ.get("BATON_SCHEDULES", "0"))
SETTINGS = settings(
    max_examples=LARGE_RUN or 30,
    stateful_step_count=60,
    derandomize=not LARGE_RUN,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class Handoffs(RuleBasedStateMachine):
    """One pair of nodes. Which message, block, prompt or request a rule is about is chosen by hypothesis."""

    kind: ClassVar[Kind]
    num_delivered: ClassVar[list[int]]

    def __init__(self) -> None:
        super().__init__()
        self.fates: dict[type[Any], Sequence[float]] = {}
        self.faults: deque[Fault] = deque()
        self.requests: dict[RequestKey, int] = {}
        self.world = World(self.kind, fate=self._fate, plan=self._fault)
        self.patch = pytest.MonkeyPatch()
        for target, value in patches(self.world).items():
            self.patch.setattr(target, value)

    def _fate(self, message: object) -> Sequence[float]:
        return self.fates.pop(type(message), (TRANSIT_S,))

    def _fault(self, number: int, key: RequestKey, move: Move) -> Fault:
        return self.faults.popleft() if self.faults else Fault()

    def _pick(self, keys: Sequence[RequestKey], which: int) -> RequestKey | None:
        return keys[which % len(keys)] if keys else None

    # requests

    @rule(
        num_tokens=st.integers(1, _MAX_TOKENS),
        num_cached_blocks=st.integers(0, 2),
        legs=st.sampled_from(
            ["both", "both", "both", "prefill", "decode", "prefill, of another life", "decode, of another"]
        ),
    )
    def arrive(self, num_tokens: int, num_cached_blocks: int, legs: str) -> None:
        """A request comes to both nodes or to one, with the names of their lives or of earlier ones."""
        key = key_of(len(self.requests) + 1)
        self.requests[key] = num_tokens
        peer = self.world.life.peer
        if legs.startswith(("both", "prefill")):
            self._begin(key, RECEIVER_EPOCH - legs.endswith("life"))
        if legs.startswith(("both", "decode")):
            self._grant(key, num_cached_blocks, replace(peer, epoch=peer.epoch - legs.endswith("another")))

    @rule(num_tokens=st.integers(1, _MAX_TOKENS), phase=st.integers(0, 3), num_pieces=st.integers(0, 4))
    def arrive_and_go_on(self, num_tokens: int, phase: int, num_pieces: int) -> None:
        """A request comes to both nodes, and its prompt is computed in part or to its end before anything else."""
        self.arrive(num_tokens, 0, "both")
        self.run(0, 4)
        for part in range(phase):
            self.go_on(len(self.world.life.computing) - 1, ("chunk", "layers", "finish")[part])
            self.run(num_pieces, 2)

    @rule(which=_COUNT, num_cached_blocks=st.integers(0, 2), leg=st.sampled_from(["prefill", "decode"]))
    def other_leg_comes(self, which: int, num_cached_blocks: int, leg: str) -> None:
        """The other leg of a request comes late, or once more, or gets the room it waits for."""
        key = self._pick([*self.requests], which)
        if key is None:
            return
        if leg == "prefill" and key not in self.world.life.pool.tables:
            self._begin(key)
        is_over = key in self.world.granted or self.world.decode_pool.num_told[key]
        if leg == "decode" and not is_over:
            self._grant(key, num_cached_blocks, self.world.life.peer)

    def _begin(self, key: RequestKey, decode_epoch: int = RECEIVER_EPOCH) -> None:
        if not self.world.is_prefill_frozen:
            with suppress(NoFreeBlocks):
                self.world.begin(key, self.requests[key], decode_epoch=decode_epoch)

    def _grant(self, key: RequestKey, num_cached_blocks: int, peer: PrefillPeer) -> None:
        num_tokens = self.requests[key]
        try:
            self.world.grant(key, num_tokens, min(num_cached_blocks, num_tokens // BLOCK_SIZE) * BLOCK_SIZE, peer)
        except NoFreeBlocks:
            self.world.wait_for_room(key)

    # prompts

    @rule(which=_COUNT, what=st.sampled_from(["chunk", "layer", "layers", "finish", "finish", "fail", "end"]))
    def go_on(self, which: int, what: str) -> None:
        """A prompt goes on by a chunk, a layer of its last step or all, or it ends: well, failed, or by its token 1."""
        world, key = self.world, self._pick(self.world.life.computing, which)
        if key is None or world.is_prefill_frozen:
            return
        prompt = world.life.prompts[key]
        if what == "fail":
            world.fail_step(key)
        elif what == "end":
            world.cancel_prefill(key, "token 1 ended it", request_ended=True)
        elif what == "chunk" and prompt.layers is None:
            world.compute(key, min(prompt.num_computed_tokens + 7, prompt.num_tokens))
        elif prompt.layers is None and what == "finish":
            world.finish(key)
        else:
            world.begin_last_step(key)
            for _ in range(NUM_LAYERS if what == "layers" else 1):
                if key in world.life.prompts:
                    world.store_layer(key)

    # somebody gives up

    @rule(which=_COUNT, legs=st.sampled_from(["both", "prefill", "decode"]))
    def cancel(self, which: int, legs: str) -> None:
        """The client is gone; either leg may hear of it alone."""
        if key := self._pick([*self.requests], which):
            if legs != "prefill":
                self.world.cancel_decode(key)
            if legs != "decode":
                self.world.cancel_prefill(key, "cancelled")

    @rule(which=_COUNT)
    def retire(self, which: int) -> None:
        """A delivered request is over."""
        if key := self._pick([*self.world.decode_pool.running], which):
            self.world.decode_pool.retire(key)

    # what happens to messages and blocks

    @rule(kind=st.sampled_from(_MESSAGES), fate=st.sampled_from(sorted(_FATES)))
    def disturb_message(self, kind: type[Any], fate: str) -> None:
        """The next message of this type is lost, doubled or late."""
        self.fates[kind] = _FATES[fate]

    @rule(fault=st.sampled_from(sorted(_FAULTS)), num_before=st.integers(0, 3), num_times=st.integers(1, 2))
    def disturb_block(self, fault: str, num_before: int, num_times: int) -> None:
        """Some of the next blocks arrive damaged, late, twice or not at all."""
        if (self.kind.can_be_late or "late" not in fault) and (self.kind.can_double or fault != "doubled"):
            self.faults.extend([Fault()] * num_before + [_FAULTS[fault]] * num_times)

    # what happens to nodes and connections

    @rule(what=st.sampled_from(["break", "restart", "freeze", "cut", "fence"]), num_turns=st.integers(0, 8))
    def disturb_nodes(self, what: str, num_turns: int) -> None:
        """Connections break; the prefill node is killed, or frozen; no block passes; the receiver is fenced. Then they
        go on, frozen or cut as they are, for up to eight seconds.
        """
        world = self.world
        if what == "break":
            world.break_connections()
        elif what == "restart":
            world.restart_prefill_node()
        elif what == "freeze":
            world.is_prefill_frozen = True
        elif what == "cut":
            world.cut_data()
        elif self.kind is Kind.RDMA:
            world.mend_data()
            world.fence()
        for _ in range(num_turns):
            world.turn(1.0)

    @rule()
    def mend(self) -> None:
        """What was frozen goes on where it was, and blocks pass again."""
        self.world.is_prefill_frozen = False
        self.world.mend_data()

    # time

    @rule(num_pieces=st.integers(0, 3), num_turns=st.integers(1, 6))
    def run(self, num_pieces: int, num_turns: int) -> None:
        """Both nodes do their rounds, and so many pieces are pushed."""
        self.world.push(num_pieces)
        for _ in range(num_turns):
            self.world.turn(TRANSIT_S)

    @rule(does_mend=st.booleans())
    def run_freely(self, does_mend: bool) -> None:
        """Everything that can happen at once happens."""
        if does_mend:
            self.mend()
        self.world.push(100)
        for _ in range(12):
            self.world.turn(TRANSIT_S)

    @rule(duration_s=st.sampled_from([0.3, 1.0, LEASE_S / 2, LEASE_S]))
    def pass_time(self, duration_s: float) -> None:
        """Time goes on, in steps in which both nodes look."""
        self.world.push(1)
        for _ in range(10):
            self.world.turn(duration_s / 10)

    @invariant()
    def what_must_hold_holds(self) -> None:
        """See `World.check`."""
        self.world.check()

    def teardown(self) -> None:
        """Heal everything, let time pass: nothing is left."""
        try:
            self.world.quiesce()
            self.world.check_over()
            self.num_delivered.append(len(self.world.decode_pool.delivered_kv))
        finally:
            self.patch.undo()


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name.lower())
def test_no_order_of_events_breaks_an_invariant(kind: Kind) -> None:
    num_delivered: list[int] = []
    machine = type(kind.name, (Handoffs,), {"kind": kind, "num_delivered": num_delivered})
    run_state_machine_as_test(machine, settings=SETTINGS)
    assert sum(num_delivered) > 2, "too few of the handoffs came through for this to show much"


@dataclass(slots=True)
class Unwatched:
    """A side whose sockets are simulated: nobody can wait for them."""

    side: SendingSide | ReceivingSide

    def do(self, command: object, now_s: float) -> None:
        raise AssertionError("nobody posts anything")

    def wait_on(self) -> Sequence[Any]:
        return ()

    def round(self, now_s: float) -> float:
        return self.side.round(now_s)

    def close(self) -> None:
        self.side.close()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_leases_end_while_the_engine_is_stuck_in_a_step(side: str) -> None:
    sender, receiver = replace(sending_facts(), lease_s=0.06), replace(receiving_facts(), lease_s=0.06)
    with open_pair(MEMORY, sender=sender, receiver=receiver) as pair:
        node: PrefillNode | DecodeNode = pair.prefill if side == "prefill" else pair.decode
        node.now_s = time.monotonic()
        if isinstance(node, PrefillNode):
            node.prefill(KEY, 4)
        else:
            node.grant(KEY, 4, pair.prefill.peer)
        assert node.pool.pool.num_held == 1
        thread = TransferThread(Unwatched(node.side), "transfer", lambda: None)
        thread.start()
        # this is the engine's thread: it is in its step, and neither polls nor posts
        deadline_s = time.monotonic() + 5.0
        while node.pool.pool.num_held and time.monotonic() < deadline_s:
            time.sleep(0.005)
        thread.close()
        assert thread.failure is None
        assert node.side.counters.num_expired == 1
        assert node.pool.pool.num_free == NUM_BLOCKS
