"""Whole handoffs between nodes whose pools lie in different memory, and what the two agree on.

Devices are late (see `late_stream`): a block that is reported, or a slot that is used again, before a copy was waited
for shows in the tokens, because the engine samples them from the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import cast

import pytest
import torch
import zmq

from baton.decode_node.leg import DecodeLeg
from baton.kvtransfer.commands import ReceivingNotice, SendingNotice
from baton.kvtransfer.integrity import AUTO, DOT64, NONE, resolve
from baton.kvtransfer.mailbox import Mailbox
from baton.kvtransfer.messages import PeerWelcome
from baton.kvtransfer.pools.base import KvPool
from baton.kvtransfer.pools.device import DevicePool
from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.process_identity import this_process
from baton.kvtransfer.pusher import Pusher
from baton.kvtransfer.receiver_connections import ReceiverConnections
from baton.kvtransfer.receiving import ReceivingSide
from baton.kvtransfer.receiving_end import ReceivingEnd
from baton.kvtransfer.sender_connections import open_listener
from baton.kvtransfer.sending import SendingSide
from baton.kvtransfer.sending_end import SendingEnd
from baton.kvtransfer.transports.base import Blocks, Receiver
from baton.kvtransfer.transports.registry import PoolMemory, SenderFactory, TransportSettings, open_receivers
from baton.node.first_steps import FirstSteps
from baton.prefill_node.leg import PrefillLeg
from tests.kvtransfer.late_stream import late_pool
from tests.kvtransfer.legs import Echo, LossyLink, Node, Relay, SteppedThread, open_source, undisturbed
from tests.kvtransfer.oracle import OracleRunner, make_core
from tests.kvtransfer.pair import NUM_BLOCKS, SETTINGS, empty_blocks, receiving_facts, sending_facts
from tests.kvtransfer.pools import BLOCK_BYTES, LAYOUT, key_of

HOST, DEVICE = "host", "device"
_PROMPTS = [[7, 3, 9, 1, 4] * 5, [2, 8, 8] * 4, list(range(30))]


@dataclass(slots=True)
class Kind:
    """What a node is made of."""

    memory: str
    choice: str = "shm"
    checksum: str = DOT64
    build: Callable[[Blocks], KvPool] = field(default=late_pool)

    def pool(self, blocks: Blocks) -> KvPool:
        return HostPool(blocks) if self.memory == HOST else self.build(blocks)


@contextmanager
def open_relay(sender: Kind, receiver: Kind) -> Iterator[tuple[Relay, list[Receiver]]]:
    """Two nodes with pools of these kinds, their transports made as nodes make them."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    of_sender, of_receiver = (
        TransportSettings(kind.choice, context, "127.0.0.1", SETTINGS, this_process()) for kind in (sender, receiver)
    )
    memory = PoolMemory(of_receiver, "receiver")
    sent_blocks, received_blocks = empty_blocks(), empty_blocks()
    if receiver.memory == HOST:
        received_blocks = memory.allocate(NUM_BLOCKS * BLOCK_BYTES).reshape(NUM_BLOCKS, BLOCK_BYTES)
    sent_pool, received_pool = sender.pool(sent_blocks), receiver.pool(received_blocks)
    prefill_runner, decode_runner = OracleRunner(sent_blocks), OracleRunner(received_blocks)
    prefill_core, decode_core = make_core(sent_blocks, prefill_runner), make_core(received_blocks, decode_runner)
    socket, address = open_listener(context, "127.0.0.1", 0, SETTINGS)
    link = LossyLink(socket)
    factory = SenderFactory(of_sender, PoolMemory(of_sender, "sender"), sent_pool)
    receivers = open_receivers(of_receiver, memory, received_pool)
    sent: Mailbox[SendingNotice] = Mailbox()
    kinds = [resolve(kind.checksum, in_device_memory=kind.memory == DEVICE) for kind in (sender, receiver)]
    sending = SendingSide(
        replace(sending_facts(), checksum=kinds[0]),
        cast("zmq.Socket[bytes]", link),
        factory,
        Pusher(sent_pool, kinds[0]),
        sent,
    )
    received: Mailbox[ReceivingNotice] = Mailbox()
    facts = replace(receiving_facts(), checksum=kinds[1])
    connections = ReceiverConnections(facts, context, SETTINGS, receivers)
    receiving = ReceivingSide(facts, connections, received_pool, received)
    sending_end = SendingEnd(sending, SteppedThread(sending, "sending"), sent)
    receiving_end = ReceivingEnd(receiving, SteppedThread(receiving, "receiving"), received)
    first_steps = FirstSteps(), FirstSteps()
    prefill_leg = PrefillLeg(prefill_core, sending_end, LAYOUT.layer_ends, first_steps[0])
    source, source_end, _ = open_source(context, decode_core, facts, factory, received_pool)
    decode_leg = DecodeLeg(decode_core, receiving_end, first_steps[1], source)
    nodes = (
        Node(prefill_leg, [sending_end], prefill_core, prefill_runner, first_steps[0]),
        Node(decode_leg, [receiving_end, source_end], decode_core, decode_runner, first_steps[1]),
    )
    try:
        yield Relay(*nodes, link, address, Echo(context)), receivers
    finally:
        for node in nodes:
            node.close()
        for each in receivers:
            each.close()
        factory.close()
        memory.close()
        context.destroy(linger=0)


def transport_of(relay: Relay) -> list[str]:
    """By what the two agreed to hand over."""
    return [message.transport for message in relay.link.seen if isinstance(message, PeerWelcome)]


@pytest.mark.parametrize(
    ("sender", "receiver", "transport"),
    [
        (Kind(HOST), Kind(DEVICE), "shm_slots"),
        (Kind(DEVICE), Kind(HOST), "shm_slots"),
        (Kind(DEVICE), Kind(DEVICE), "shm_slots"),
        (Kind(DEVICE, "zmq"), Kind(DEVICE), "zmq"),
        (Kind(DEVICE), Kind(DEVICE, "zmq"), "zmq"),
        (Kind(HOST), Kind(HOST), "shm"),
        (Kind(DEVICE, checksum=NONE), Kind(DEVICE, checksum=NONE), "shm_slots"),
        (Kind(DEVICE, "zmq", NONE), Kind(DEVICE, "zmq", NONE), "zmq"),
        (Kind(DEVICE, checksum=AUTO), Kind(DEVICE, checksum=AUTO), "shm_slots"),
    ],
    ids=lambda value: f"{value.memory} {value.choice} {value.checksum}" if isinstance(value, Kind) else value,
)
def test_streams_are_exact_wherever_the_pools_are(sender: Kind, receiver: Kind, transport: str) -> None:
    with open_relay(sender, receiver) as (relay, _):
        # the second round finds the blocks in D's cache
        for number in range(2):
            keys = [key_of(10 * number + place) for place in range(len(_PROMPTS))]
            for key, prompt in zip(keys, _PROMPTS, strict=True):
                relay.ask(key, prompt)
            relay.until_finished(*keys)
            for key, prompt in zip(keys, _PROMPTS, strict=True):
                assert relay.decode.stream(key) == undisturbed(prompt)
        assert transport_of(relay) == [transport]
        assert relay.decode.failures == []
        assert relay.is_empty


def test_damage_on_a_device_is_found_and_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    damaged: list[int] = []
    real_write = DevicePool._write_from

    def write(self: DevicePool, source: torch.Tensor, block_ids: list[int]) -> None:
        if not damaged:
            damaged.append(block_ids[-1])
            source = source.clone()
            source[len(block_ids) - 1, 77] ^= 1
        real_write(self, source, block_ids)

    monkeypatch.setattr(DevicePool, "_write_from", write)
    with open_relay(Kind(DEVICE), Kind(DEVICE)) as (relay, _):
        relay.ask(key_of(1), _PROMPTS[0])
        relay.until_finished(key_of(1))
        assert damaged
        assert relay.decode.stream(key_of(1)) == undisturbed(_PROMPTS[0])
        assert relay.decode.leg._receiving.counters.num_damaged_blocks == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("what", ["cut", "swapped"])
def test_what_a_device_wrote_wrong_twice_is_never_used(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    real_write = DevicePool._write_from

    def write(self: DevicePool, source: torch.Tensor, block_ids: list[int]) -> None:
        if what == "swapped" and len(block_ids) > 1:
            source = source.clone()
            source[:2] = source[[1, 0]]
        elif what == "cut":
            source = source.clone()
            source[: len(block_ids), 64:] = 0
        real_write(self, source, block_ids)

    monkeypatch.setattr(DevicePool, "_write_from", write)
    with open_relay(Kind(DEVICE), Kind(DEVICE)) as (relay, _):
        relay.ask(key_of(1), list(range(30)))
        relay.until(lambda: bool(relay.decode.failures))
        assert "arrived damaged, twice" in relay.decode.failures_of(key_of(1))[0]
        assert relay.decode.stream(key_of(1)) == []


def test_kinds_of_checksum_that_differ_by_the_memory_are_refused_naming_both_and_the_flag() -> None:
    with open_relay(Kind(HOST, checksum=AUTO), Kind(DEVICE, checksum=AUTO)) as (relay, _):
        relay.ask(key_of(1), _PROMPTS[0])
        relay.until(lambda: bool(relay.decode.failures))
        (reason,) = relay.decode.failures_of(key_of(1))
        assert "KV checksum is xxh3 here and dot64 at D" in reason
        assert "--kv-checksum" in reason
        assert transport_of(relay) == []
