"""Handoffs between nodes whose ranks have pools of their own: real sockets and channels, with threads for the ranks."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
import zmq

from baton.engine.runner.kv_memory import allocate_shared
from baton.kvtransfer.incoming_handoffs import ReceivingCounters
from baton.kvtransfer.integrity import DOT64
from baton.kvtransfer.messages import RANK_ENDPOINTS, Endpoint, PeerHello, RankEndpoint, RankEndpoints
from baton.kvtransfer.pools import dot64
from baton.kvtransfer.pools.base import Checksums
from baton.kvtransfer.pools.open import open_pool
from baton.kvtransfer.process_identity import this_process
from baton.kvtransfer.sending import SendingCounters
from baton.kvtransfer.transports import part_registry as rank_transports
from baton.kvtransfer.transports.base import Move, Sender, Starting
from baton.kvtransfer.transports.nixl.memory import Region
from baton.kvtransfer.transports.nixl.thread import AgentThread
from baton.kvtransfer.transports.nixl.wire import DETAILS, Channel, Connect, PoolDetails, Ready, Write, WriteEnded
from baton.kvtransfer.transports.part_registry import Network, RankPool, taken_by_ranks
from baton.kvtransfer.transports.registry import (
    NIXL,
    SLOTS,
    ZMQ,
    PoolMemory,
    SenderFactory,
    TransportSettings,
    open_receivers,
)
from baton.kvtransfer.write_proof import WriteProof
from baton.ranks.transfer import lines as rank_lines
from baton.ranks.transfer.end import RankEnd
from baton.ranks.transfer.lines import RankLines
from baton.ranks.transfer.messages import (
    Arrived,
    Begin,
    Expect,
    Forgotten,
    Listen,
    Listening,
    Report,
    TransferChannel,
)
from baton.ranks.transfer.pool import RanksPool
from baton.ranks.transfer.receiver import RanksReceiver, open_ranks_receivers
from baton.ranks.transfer.senders import RanksSenders
from baton.ranks.transfer.serving import start_transfers
from baton.runtime.channel import ChannelBroken
from baton.wire.errors import InvalidSetting, Refused, TransferFailed
from baton.wire.kv_shard import WHOLE_BLOCK, KvDivision, KvShard, own_layout
from baton.wire.layout import KvLayout, LayerKv
from baton.wire.links import LinkSettings
from tests.kvtransfer.test_parts import cut
from tests.kvtransfer.transports.nixl.nixl_pair import needs_nixl, preserved_environment
from tests.request_keys import key_of

LAYOUT = KvLayout.of_layers("float16", 4, [LayerKv(2, 8)] * 3)
NUM_BLOCKS = 12
KEY = key_of(1)
MOVES = [Move(index, source, 11 - source, 5) for index, source in enumerate((3, 4, 7, 1))]
TARGETS, GENERATIONS = tuple(move.target for move in MOVES), tuple(move.generation for move in MOVES)
_WAIT_S = 20.0
_LOOPBACK = "127.0.0.1"


class Pools:
    """The pools of a node of some division, in memory that agents can map, or that stands for a device's. `lines`: of
    its driver, for one direction."""

    def __init__(
        self, division: KvDivision, context: zmq.Context[zmq.Socket[bytes]], *, is_device: bool = False
    ) -> None:
        self.context, self.shards, self.is_device = context, division.shards, is_device
        regions = {shard: allocate_shared(NUM_BLOCKS * own_layout(LAYOUT, shard).block_bytes) for shard in self.shards}
        self.descriptors = {shard: region.descriptor for shard, region in regions.items()}
        self.memories = {shard: region.array.reshape(NUM_BLOCKS, -1) for shard, region in regions.items()}
        self.pools = {
            shard: open_pool(torch.from_numpy(memory) if is_device else memory)
            for shard, memory in self.memories.items()
        }
        driver, *others = reversed(self.shards)
        self.threads: list[threading.Thread] = []
        self.ends = {shard: socket.socketpair() for shard in others}
        network = Network(context, _LOOPBACK, LinkSettings())
        begin = Begin(_LOOPBACK, "", "decode")
        for shard, (_, theirs) in self.ends.items():
            self.threads += start_transfers(self.own(shard), [theirs], lambda _: network)
        end = RankEnd(self.own(driver), network)
        self.lines = RankLines(end, driver, {shard: ours for shard, (ours, _) in self.ends.items()}, begin)

    def own(self, shard: KvShard) -> RankPool:
        return RankPool(self.pools[shard], LAYOUT, shard, self.descriptors[shard])

    def receiver(self, transport: str, counters: ReceivingCounters | None = None) -> RanksReceiver:
        (receiver,) = open_ranks_receivers(self.lines, counters or ReceivingCounters(), [transport])
        return receiver

    def senders(self, transport: str, counters: SendingCounters | None = None) -> RanksSenders:
        told = counters or SendingCounters()
        return RanksSenders(self.lines, told, [transport], lambda hello: True, are_mapping=self.is_device)

    def fill(self, whole: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> None:
        for shard, memory in self.memories.items():
            memory[:] = cut(LAYOUT, shard, whole)

    def checksums(self) -> Checksums:
        return RanksPool(self.lines, LAYOUT).checksums(DOT64)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Tests of later files are not to find what agents on threads say to UCX."""
    with preserved_environment():
        yield


@pytest.fixture
def opened(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Callable[[KvDivision], Pools]]:
    """Nodes that end with the test."""
    nodes: list[Pools] = []

    def make(division: KvDivision, *, is_device: bool = False) -> Pools:
        nodes.append(Pools(division, context, is_device=is_device))
        return nodes[-1]

    yield make
    for node in nodes:
        node.lines.close()
        for thread in node.threads:
            thread.join(_WAIT_S)
        for descriptor in node.descriptors.values():
            os.close(descriptor)


def whole_blocks() -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.random.default_rng(7).integers(0, 256, (NUM_BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)


def hello(*endpoints: Endpoint) -> PeerHello:
    return PeerHello("D", 1, 2, "model", LAYOUT, NUM_BLOCKS, DOT64, this_process(), endpoints)


def wait(is_done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _WAIT_S
    while not is_done():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def push(sender: Sender, moves: Sequence[Move], each_round: Callable[[], object]) -> None:
    def is_pushed() -> bool:
        each_round()
        return sender.push(KEY, moves)

    wait(is_pushed)


def reached(senders: RanksSenders, endpoint: Endpoint) -> Sender:
    """A sender, once all ranks are ready to send."""
    found: list[Sender] = []

    def is_open() -> bool:
        senders.poll()
        with contextlib.suppress(Starting):
            found.append(senders.open(hello(endpoint))[1])
        return bool(found)

    wait(is_open)
    return found[0]


def sums(checksums: Checksums, block_ids: Sequence[int]) -> list[int]:
    pending = checksums.begin(block_ids)
    found: list[int] = []

    def is_done() -> bool:
        values = pending.take()
        found.extend(values or ())
        return values is not None

    wait(is_done)
    return found


@pytest.mark.parametrize(
    ("transport", "sources", "targets", "on_device"),
    [
        (ZMQ, KvDivision(2), KvDivision(2), ""),
        (ZMQ, KvDivision(1), KvDivision(2, 2), ""),
        (ZMQ, KvDivision(4), KvDivision(2, 3), ""),
        (ZMQ, KvDivision(2, 2), KvDivision(4), ""),
        (SLOTS, KvDivision(2), KvDivision(2), ""),
        (SLOTS, KvDivision(2, 2), KvDivision(4), ""),
        (ZMQ, KvDivision(2), KvDivision(2), "both"),
        (ZMQ, KvDivision(2), KvDivision(4), "both"),
        (SLOTS, KvDivision(2), KvDivision(1), "both"),
        (SLOTS, KvDivision(4), KvDivision(2), "sending"),
        (ZMQ, KvDivision(2, 2), KvDivision(2), "receiving"),
        pytest.param(NIXL, KvDivision(2), KvDivision(1), "", marks=needs_nixl),
        pytest.param(NIXL, KvDivision(2), KvDivision(1), "both", marks=needs_nixl),
    ],
)
def test_blocks_go_from_rank_to_rank(
    opened: Callable[..., Pools], transport: str, sources: KvDivision, targets: KvDivision, on_device: str
) -> None:
    whole = whole_blocks()
    sending = opened(sources, is_device=on_device in ("both", "sending"))
    receiving = opened(targets, is_device=on_device in ("both", "receiving"))
    sending.fill(whole)
    received, sent = ReceivingCounters(), SendingCounters()
    receiver, senders = receiving.receiver(transport, received), sending.senders(transport, sent)
    sender = reached(senders, receiver.endpoint)
    # by nixl a rank on a device may map the peer's pool, which is told of each
    is_mapping = sending.is_device and transport == NIXL
    assert sender.writers == (this_process(),) * (len(sources.shards) if is_mapping else 0)
    receiver.expect(KEY, TARGETS, GENERATIONS)
    push(sender, MOVES[:3], receiver.poll)
    push(sender, MOVES[3:], receiver.poll)
    arrived: set[int] = set()

    def is_there() -> bool:
        senders.poll()
        receiver.poll()
        for each in receiver.take_arrivals():
            assert each.key == KEY
            arrived.update(range(each.first_index, each.first_index + each.count))
        return len(arrived) == len(MOVES) and not sender.is_reading(KEY)

    wait(is_there)
    for shard, memory in receiving.memories.items():
        expected = np.zeros_like(memory)
        expected[list(TARGETS)] = cut(LAYOUT, shard, whole)[[move.source for move in MOVES]]
        assert (memory == expected).all()
    num_bytes = len(MOVES) * sum(own_layout(LAYOUT, shard).block_bytes for shard in targets.shards)
    assert (sent.num_part_bytes, received.num_part_bytes) == (num_bytes, num_bytes)
    # the checksum is that of whole blocks, on both sides, and a byte that is wrong in one rank changes it
    checksum, mine = dot64.Dot64(LAYOUT.block_bytes).checksum, receiving.checksums()
    right = [checksum(whole[move.source]) for move in MOVES]
    assert sums(sending.checksums(), [move.source for move in MOVES]) == right == sums(mine, TARGETS)
    receiving.memories[receiving.shards[0]][TARGETS[2], 3] ^= 1
    assert [a == b for a, b in zip(sums(mine, TARGETS), right, strict=True)] == [True, True, False, True]


@pytest.mark.parametrize(
    ("choice", "transport", "division", "is_device"),
    [
        ("zmq", ZMQ, KvDivision(2, 2), False),
        ("shm", SLOTS, KvDivision(2, 2), False),
        ("zmq", ZMQ, KvDivision(2), True),
        ("shm", SLOTS, KvDivision(4), True),
    ],
)
def test_a_node_with_one_pool_gives_to_ranks_and_takes_from_them(
    opened: Callable[..., Pools],
    context: zmq.Context[zmq.Socket[bytes]],
    choice: str,
    transport: str,
    division: KvDivision,
    is_device: bool,
) -> None:
    whole, ranks = whole_blocks(), opened(division, is_device=is_device)
    settings = TransportSettings(choice, context, _LOOPBACK, LinkSettings(), this_process())
    memories = PoolMemory(settings, "sender"), PoolMemory(settings, "receiver")
    whole_of_first, whole_of_second = (memory.allocate(whole.nbytes).reshape(whole.shape) for memory in memories)
    whole_of_first[:] = whole
    first, second = (
        open_pool(torch.from_numpy(each) if is_device else each) for each in (whole_of_first, whole_of_second)
    )
    factory = SenderFactory(settings, memories[0], first)
    among = ranks.receiver(transport)
    receivers = open_receivers(settings, memories[1], second, LAYOUT)
    (alone,) = (each for each in receivers if each.endpoint.transport == transport)
    _, sender = factory.open(hello(among.endpoint))
    among.expect(KEY, TARGETS, GENERATIONS)
    push(sender, MOVES, among.poll)

    def has_come() -> bool:
        sender.poll()
        among.poll()
        return sum(each.count for each in among.take_arrivals()) == len(MOVES)

    wait(has_come)
    sender.close()
    # and back, from the ranks: other lines of the same pools
    again = opened(division)
    for shard, own in ranks.memories.items():
        again.memories[shard][:] = own
    senders = again.senders(transport)
    _, sender = senders.open(hello(Endpoint("shm", "not for ranks"), alone.endpoint))
    alone.expect(KEY, TARGETS, GENERATIONS)
    push(sender, [Move(index, block, block, 5) for index, block in enumerate(TARGETS)], alone.poll)
    places: list[int] = []

    def is_back() -> bool:
        senders.poll()
        alone.poll()
        places.extend(each.first_index for each in alone.take_arrivals())
        return len(places) == len(MOVES)

    wait(is_back)
    assert (whole_of_second[list(TARGETS)] == whole[[move.source for move in MOVES]]).all()
    for each in receivers:
        each.close()
    factory.close()
    for memory in memories:
        memory.close()


def test_blocks_are_written_until_every_rank_has_forgotten_them(opened: Callable[[KvDivision], Pools]) -> None:
    sending, receiving = opened(KvDivision(2)), opened(KvDivision(2))
    receiver, senders = receiving.receiver(ZMQ), sending.senders(ZMQ)
    sending.fill(whole_blocks())
    _, sender = senders.open(hello(receiver.endpoint))
    receiver.expect(KEY, TARGETS, GENERATIONS)
    receiver.forget(KEY)
    assert receiver.is_writing(KEY)

    def is_forgotten() -> bool:
        receiver.poll()
        return not receiver.is_writing(KEY)

    wait(is_forgotten)
    push(sender, MOVES, receiver.poll)

    def is_over() -> bool:
        senders.poll()
        receiver.poll()
        return not sender.is_reading(KEY)

    wait(is_over)
    assert not receiver.take_arrivals()
    assert not any(memory.any() for memory in receiving.memories.values())


@pytest.mark.parametrize("transport", [ZMQ, SLOTS])
def test_blocks_that_overtake_the_order_to_expect_them_are_written(
    opened: Callable[[KvDivision], Pools], context: zmq.Context[zmq.Socket[bytes]], transport: str
) -> None:
    whole, sending, receiving = whole_blocks(), opened(KvDivision(2)), opened(KvDivision(1))
    sending.fill(whole)
    unread: list[Expect] = [Expect(transport, 1, KEY, TARGETS, GENERATIONS)]
    network = Network(context, _LOOPBACK, LinkSettings())
    end = RankEnd(receiving.own(WHOLE_BLOCK), network, lambda is_known: end.take(unread.pop()) if unread else None)
    end.take(Listen((transport,)))
    end.work()
    (listening,) = (report for report in end.reports if isinstance(report, Listening))
    where = RANK_ENDPOINTS.encode(RankEndpoints(KvDivision(1), (listening.endpoint,)))
    senders = sending.senders(transport)
    _, sender = senders.open(hello(Endpoint(transport, "", where)))

    def work() -> None:
        senders.poll()
        end.work()

    push(sender, MOVES, work)

    def has_come() -> bool:
        senders.poll()
        end.work()
        return sum(report.count for report in end.reports if isinstance(report, Arrived)) == len(MOVES)

    wait(has_come)
    assert (receiving.memories[WHOLE_BLOCK][list(TARGETS)] == whole[[move.source for move in MOVES]]).all()
    sender.close()
    end.close()


def test_blocks_whose_order_is_still_on_its_way_to_another_machine_wait_for_it(
    opened: Callable[[KvDivision], Pools], context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    whole, sending, receiving = whole_blocks(), opened(KvDivision(2)), opened(KvDivision(1))
    sending.fill(whole)
    network, (ours, theirs) = Network(context, _LOOPBACK, LinkSettings()), socket.socketpair()
    threads = start_transfers(receiving.own(WHOLE_BLOCK), [theirs], lambda _: network, order_s=_WAIT_S)
    channel = TransferChannel(ours, "the rank")
    for order in (Begin(_LOOPBACK, "", "decode"), Listen((ZMQ,))):
        channel.send(order, _WAIT_S)
    listening = channel.receive(_WAIT_S)
    assert isinstance(listening, Listening)
    where = RANK_ENDPOINTS.encode(RankEndpoints(KvDivision(1), (listening.endpoint,)))
    senders = sending.senders(ZMQ)
    _, sender = senders.open(hello(Endpoint(ZMQ, "", where)))
    push(sender, MOVES, senders.poll)

    def has_left() -> bool:
        senders.poll()
        return not sender.is_reading(KEY)

    wait(has_left)
    time.sleep(0.2)  # they are there, and nobody has announced them
    channel.send(Expect(ZMQ, 1, KEY, TARGETS, GENERATIONS), _WAIT_S)
    num_arrived = 0
    while num_arrived < len(MOVES):
        arrived = channel.receive(_WAIT_S)
        assert isinstance(arrived, Arrived)
        num_arrived += arrived.count
    assert (receiving.memories[WHOLE_BLOCK][list(TARGETS)] == whole[[move.source for move in MOVES]]).all()
    channel.close()
    for thread in threads:
        thread.join(_WAIT_S)


@needs_nixl
def test_a_rank_whose_nixl_agent_starts_again_sends_when_it_has_started(
    opened: Callable[[KvDivision], Pools], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[object] = []
    may_start, may_crash = threading.Event(), threading.Event()
    may_start.set()

    def agent(channel: Channel, region: Region, stopped: threading.Event) -> None:
        may_start.wait(_WAIT_S)
        details = PoolDetails(b"", region.base_address, region.num_bytes, region.kind, region.device_index)
        channel.send(Ready("agent", this_process(), details))
        while not stopped.is_set() and not may_crash.is_set() and channel.is_open:
            for command in channel.receive():
                commands.append(command)
                if isinstance(command, Write):
                    channel.send(WriteEnded(command.write_id, True, ""))
            time.sleep(0.001)

    def on_a_thread(own: RankPool, network: Network) -> AgentThread:
        return AgentThread(own.pool.memory, network.host, agent)

    monkeypatch.setattr(rank_transports, "_open_agent", on_a_thread)
    senders = (node := opened(KvDivision(1))).senders(NIXL)
    node.lines.round()
    there = PoolDetails(b"", 0, NUM_BLOCKS * LAYOUT.block_bytes, "DRAM", 0)
    peer = hello(Endpoint(NIXL, "there", DETAILS.encode(there)))
    _, first = senders.open(peer)

    def is_connected() -> bool:
        node.lines.round()
        return bool(commands)

    wait(is_connected)
    may_start.clear()
    may_crash.set()

    def has_failed() -> bool:
        senders.poll()
        try:
            first.poll()
        except TransferFailed:
            return True
        return False

    wait(has_failed)
    may_crash.clear()
    commands.clear()
    _, again = senders.open(peer)
    assert again.push(KEY, MOVES)
    for _ in range(20):
        senders.poll()
    again.poll()
    assert (commands, again.is_reading(KEY)) == ([], True)
    may_start.set()

    def is_sent() -> bool:
        senders.poll()
        return not again.is_reading(KEY)

    wait(is_sent)
    again.poll()
    assert [type(command) for command in commands] == [Connect, Write]


def test_what_cannot_be_reached_is_no_sender(opened: Callable[[KvDivision], Pools]) -> None:
    sending = opened(KvDivision(2))
    senders = RanksSenders(sending.lines, SendingCounters(), [SLOTS, ZMQ], lambda hello: False)
    with pytest.raises(Refused, match=r"nixl: ranks of this node take shm_slots or zmq; .* do not share memory"):
        senders.open(hello(Endpoint(NIXL, "agent"), Endpoint(SLOTS, "elsewhere")))
    one = RankEndpoints(KvDivision(2), (RankEndpoint("one"),))
    for details in (RANK_ENDPOINTS.encode(one), b"something else"):
        with pytest.raises(TransferFailed, match=r"each of its ranks|does not decode"):
            senders.open(hello(Endpoint(ZMQ, "", details)))
    _, sender = senders.open(hello(Endpoint(ZMQ, "nowhere")))

    def has_failed() -> bool:
        senders.poll()
        try:
            sender.poll()
        except TransferFailed as error:
            return "cannot be dialled" in str(error)
        return False

    wait(has_failed)
    sender.close()
    senders.poll()


def test_ranks_take_the_transports_that_reach_them_and_refuse_others_by_name() -> None:
    choices = ("auto", "shm", "zmq", "nixl")
    assert [taken_by_ranks(choice, 1) for choice in choices] == [(SLOTS, ZMQ), (SLOTS, ZMQ), (ZMQ,), (NIXL,)]
    reaching = [choice for choice in choices if choice != "shm"]
    assert [taken_by_ranks(choice, 2) for choice in reaching] == [(ZMQ,), (ZMQ,), (NIXL,)]
    with pytest.raises(InvalidSetting, match=r"^--kv-transport shm: the ranks are on 2 machines, which share no mem"):
        taken_by_ranks("shm", 2)
    for num_machines in (1, 2):
        with pytest.raises(InvalidSetting, match=r"^--kv-transport nccl: ranks .* own have auto, shm, zmq, nixl$"):
            taken_by_ranks("nccl", num_machines)


def test_a_rank_that_is_gone_or_says_something_else_ends_the_transfers(
    opened: Callable[[KvDivision], Pools], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_lines, "_REASON_S", 0.0)
    node = opened(KvDivision(2))
    heard: list[tuple[KvShard, Report]] = []
    node.lines.hear(Forgotten, lambda shard, report: heard.append((shard, report)))
    said, out_of_turn = Forgotten(ZMQ, KEY), Listening(ZMQ, RankEndpoint("tcp://127.0.0.1:1"), True)
    ((_, (_, theirs)),) = node.ends.items()
    channel = TransferChannel(theirs, "the driver")
    channel.send(said, 1.0)

    def has_heard() -> bool:
        node.lines.round()
        return bool(heard)

    wait(has_heard)
    heard.clear()
    channel.send(out_of_turn, 1.0)
    with pytest.raises(ChannelBroken, match="says Listening out of turn"):
        wait(has_heard)
    theirs.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ChannelBroken, match="is gone"):
        wait(has_heard)


def test_a_peer_by_nixl_waits_until_every_rank_on_a_device_has_said_who_it_is(opened: Callable[..., Pools]) -> None:
    sending, receiving = opened(KvDivision(2), is_device=True), opened(KvDivision(2), is_device=True)
    senders = sending.senders(ZMQ)
    # as if it had been opened with an agent for each rank
    senders._taken = [NIXL]
    with pytest.raises(Starting, match="not all ranks of this node are ready to send"):
        senders.open(hello(Endpoint(NIXL, "")))
    assert len(reached(senders, Endpoint(NIXL, "")).writers) == 2
    # of which the peer wants to know the end, where they may have mapped its pool
    receivers = [RanksReceiver(NIXL, receiving.lines, ReceivingCounters(), is_device=each) for each in (False, True)]
    proofs = [receiver.write_proof for receiver in receivers]
    assert proofs == [WriteProof.ENDPOINT_ENDED, WriteProof.BOTH_ENDED]
