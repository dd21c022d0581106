"""A reader of KV events beside a real engine: whatever it misses, its view becomes that of the block pool."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from baton.engine.cache.block_log import PublishedRun
from baton.engine.cache.block_pool import BlockPool
from baton.engine.cache.disk import disk_tier
from baton.engine.cache.hashing import block_hashes
from baton.node.kv_events import publisher as publishing
from baton.node.kv_events.config import KvEventsConfig
from baton.node.kv_events.publisher import KvEventPublisher, ReplayCounters
from baton.wire.errors import InvalidSetting
from baton.wire.prompt import Prompt
from tests.checkpoints import make_checkpoint
from tests.node.kv_events.reader import WAIT_S, Reader
from tests.node.kv_events.small_node import BLOCK_SIZE, CONFIG, NUM_BLOCKS, SmallNode

LARGE_BLOCK = 64


def prompt(first: int, num_tokens: int, salt: bytes = b"") -> Prompt:
    return Prompt.of([first, *range(1, num_tokens)], salt)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture
def make_node(checkpoint: Path) -> Iterator[Callable[..., SmallNode]]:
    nodes: list[SmallNode] = []

    def make(config: KvEventsConfig = CONFIG, **more: Any) -> SmallNode:
        nodes.append(SmallNode(checkpoint, config, **more))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


@pytest.fixture
def make_publisher() -> Iterator[Callable[..., KvEventPublisher]]:
    made: list[KvEventPublisher] = []

    def make(**more: Any) -> KvEventPublisher:
        made.append(KvEventPublisher(msgspec.structs.replace(CONFIG, **more), LARGE_BLOCK, {}))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


class LargeBatches:
    """A pool of 60 blocks, all of which each batch replaces: 20 KiB at once."""

    def __init__(self, publisher: KvEventPublisher) -> None:
        self._publisher = publisher
        self._pool = BlockPool(60)
        self._tokens = [70_000] * 60 * LARGE_BLOCK
        self._num_blocks = 0

    def publish(self) -> None:
        blocks = self._pool.allocate(60)
        hashes = [(self._num_blocks + number).to_bytes(16, "big") for number in range(60)]
        self._num_blocks += 60
        for block_id, block_hash in zip(blocks, hashes, strict=True):
            self._pool.publish(block_id, block_hash)
        self._pool.release(blocks)
        self._publisher.published(PublishedRun(Prompt.of(self._tokens), 0, None, hashes, self._tokens))
        self._publisher.changed(self._pool.take_changes())

    @property
    def hashes(self) -> set[int]:
        return {int.from_bytes(each, "big") for each in self._pool.published_hashes()}


def introduce(reader: Reader, node: SmallNode) -> None:
    """Publish until the reader hears of something: it takes ZMQ a moment to connect."""
    deadline_s = time.monotonic() + WAIT_S
    while not reader.next_number:
        assert time.monotonic() < deadline_s
        node.serve(prompt(200 + node.num_requests, 45))
        with suppress(TimeoutError):
            reader.take(reader.receive(wait_s=0.02))


def eventually(holds: Callable[[], bool]) -> None:
    """A replay is counted just after its end was sent."""
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def reader_of(node: SmallNode, **more: Any) -> Reader:
    return Reader(node.publisher.endpoint, node.publisher.replay_endpoint, **more)


def test_a_readers_view_is_that_of_the_pool_while_blocks_come_and_go(make_node: Callable[..., SmallNode]) -> None:
    node = make_node()
    with reader_of(node) as reader:
        introduce(reader, node)
        for number in range(6):  # each has 7 of the 24 blocks
            node.serve(prompt(100 + number, 45))
            reader.read_until(node.last_number)
            assert set(reader.view.blocks) == node.hashes
    assert node.publisher.blocks.num_removed > 0
    assert reader.topics == {b"kv@pod@model"}
    newest = block_hashes(node.engine.fingerprint, prompt(105, 45), (), BLOCK_SIZE)[4]
    block = reader.view.blocks[int.from_bytes(newest[-8:], "big")]
    token_ids = block.token_ids
    while block.parent is not None:
        block = reader.view.blocks[block.parent]
        token_ids = block.token_ids + token_ids
    assert token_ids == (105, *range(1, 40))


def hashes_of(node: SmallNode, prompts: Iterable[Prompt]) -> set[bytes]:
    return {each for one in prompts for each in block_hashes(node.engine.fingerprint, one, (), BLOCK_SIZE)}


def agree(node: SmallNode, reader: Reader, prompts: Sequence[Prompt]) -> bool:
    """Whether the reader, after what has changed, knows of each medium which blocks of these prompts are there."""
    node.core.take_cache_changes()  # as idle nodes do, a few times a second
    before = node.in_tiers(hashes_of(node, prompts))
    reader.catch_up(wait_s=0.02)
    known = {int.from_bytes(each[-8:], "big") for each in hashes_of(node, prompts)}
    views = [set(reader.view.media[medium]) & known for medium in ("CPU", "STORAGE")]
    return views == before and set(reader.view.blocks) & known == node.hashes & known


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, the files of which have four blocks and are written soon."""
    monkeypatch.setattr(disk_tier, "_FILE_BYTES", 4 * 4096)
    monkeypatch.setattr(disk_tier, "_LINGER_S", 0.01)
    return tmp_path


def test_a_readers_view_is_that_of_each_tier_after_losses_and_replays(
    make_node: Callable[..., SmallNode], cache: Path
) -> None:
    node = make_node(disk=cache)
    prompts = [prompt(100 + number, 45) for number in range(12)]
    with reader_of(node) as reader:  # reads nothing before it is asked for: all that it missed is replayed
        for number, each in enumerate(prompts):
            node.serve(each)
            node.serve(prompt(200 + number, 20, b"tenant"))
            eventually(lambda: agree(node, reader, prompts))
        assert all(reader.view.media[medium] for medium in ("GPU", "CPU", "STORAGE"))
        assert node.publisher.blocks.num_removed > NUM_BLOCKS
        salted = hashes_of(node, [prompt(200 + number, 20, b"tenant") for number in range(12)])
        assert not {int.from_bytes(each[-8:], "big") for each in salted} & {
            each for blocks in reader.view.media.values() for each in blocks
        }
        for medium in ("CPU", "STORAGE"):
            for block_hash, block in reader.view.media[medium].items():
                assert len(block.token_ids) == BLOCK_SIZE, block_hash


def test_what_lay_in_the_folder_is_told_of_when_its_tokens_are_known(
    make_node: Callable[..., SmallNode], cache: Path
) -> None:
    first, second = prompt(1, 45), prompt(2, 45)
    node = make_node(disk=cache)
    for each in (first, second, *(prompt(100 + number, 45) for number in range(5))):
        node.serve(each)
    eventually(lambda: len(node.in_tiers(hashes_of(node, [first]))[1]) == 5)
    node.close()
    again = make_node(disk=cache)
    eventually(lambda: len(again.in_tiers(hashes_of(again, [first]))[1]) == 5)
    with reader_of(again) as reader:
        assert agree(again, reader, [])
        assert not reader.view.media["STORAGE"]
        again.serve(first)
        eventually(lambda: agree(again, reader, [first]))
        assert reader.view.media["STORAGE"]
        assert not {int.from_bytes(each[-8:], "big") for each in hashes_of(again, [second])} & set(
            reader.view.media["STORAGE"]
        )


def test_blocks_of_a_salted_prompt_are_in_the_pool_and_in_no_view(make_node: Callable[..., SmallNode]) -> None:
    node = make_node()
    with reader_of(node) as reader:
        node.serve(prompt(1, 20))
        known = node.hashes
        node.serve(prompt(1, 20, b"tenant"))
        assert len(node.hashes) == 2 * len(known)
        reader.catch_up()
        assert set(reader.view.blocks) == known
    assert node.publisher.blocks.num_private == len(known)


def test_a_reader_that_has_lost_batches_gets_them_by_a_replay(make_node: Callable[..., SmallNode]) -> None:
    node = make_node()
    with reader_of(node) as reader:
        introduce(reader, node)
        reader.read_until(node.last_number)
        for number in range(1, 6):
            node.serve(prompt(100 + number, 45))
            while int.from_bytes(reader.receive()[1], "big") < node.last_number - 1:
                pass  # lost
            reader.read_until(node.last_number)
            assert set(reader.view.blocks) == node.hashes
    assert reader.num_replays > 5
    eventually(lambda: node.publisher.replays.num_whole == reader.num_replays)


def test_a_reader_that_takes_nothing_loses_batches_and_holds_up_nobody(
    make_publisher: Callable[..., KvEventPublisher],
) -> None:
    publisher = make_publisher(hwm=1)
    batches = LargeBatches(publisher)
    with Reader(publisher.endpoint, publisher.replay_endpoint, hwm=1) as reader:
        batches.publish()
        reader.catch_up()
        for _ in range(400):
            batches.publish()
        num_taken = 0
        with suppress(TimeoutError):
            while True:
                reader.take(reader.receive(wait_s=0.2))
                num_taken += 1
        assert num_taken < 400  # or nothing was lost
        reader.catch_up()
        assert reader.next_number == publisher.num_batches
        assert set(reader.view.blocks) == batches.hashes


def test_a_node_that_starts_again_begins_with_an_empty_view(make_node: Callable[..., SmallNode]) -> None:
    node = make_node()
    with reader_of(node) as reader:
        for number in range(3):
            node.serve(prompt(number, 45))
        reader.catch_up()
        endpoints = {"endpoint": node.publisher.endpoint, "replay_endpoint": node.publisher.replay_endpoint}
        node.publisher.close()
        again = make_node(msgspec.structs.replace(CONFIG, **endpoints))
        again.serve(prompt(9, 45))
        assert not again.hashes <= set(reader.view.blocks)
        deadline_s = time.monotonic() + WAIT_S
        while set(reader.view.blocks) != again.hashes and time.monotonic() < deadline_s:
            again.serve(prompt(again.num_requests, 20))  # until the reader has dialled again, and is told of something
            with suppress(TimeoutError):
                reader.take(reader.receive(wait_s=0.1))
                reader.catch_up()
        assert set(reader.view.blocks) == again.hashes


def test_what_is_no_longer_kept_cannot_be_replayed_and_is_counted(
    make_publisher: Callable[..., KvEventPublisher],
) -> None:
    publisher = make_publisher(buffer_steps=4)
    batches = LargeBatches(publisher)
    for _ in range(6):
        batches.publish()
    with Reader(publisher.endpoint, publisher.replay_endpoint) as reader:
        assert [number for number, _ in reader.replay(5)] == [5, 6]
        assert [number for number, _ in reader.replay(0)] == [3, 4, 5, 6]
        assert [number for number, _ in reader.replay(7)] == []
        eventually(lambda: (publisher.replays.num_whole, publisher.replays.num_cut) == (2, 1))


def test_a_reader_that_does_not_take_its_replay_is_given_up(
    make_publisher: Callable[..., KvEventPublisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "STALL_MS", 10)
    publisher = make_publisher()
    batches = LargeBatches(publisher)
    for _ in range(400):
        batches.publish()
    stalled = zmq.Context()
    try:
        dealer = stalled.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVHWM, 1)
        dealer.setsockopt(zmq.RCVBUF, 16 * 1024)
        dealer.connect(publisher.replay_endpoint)
        for request in ([b"", bytes(8)] * 3, [b"", b"x"], [b"", bytes(8)]):
            dealer.send_multipart(request)
        assert dealer.poll(int(WAIT_S * 1000))
        with Reader(publisher.endpoint, publisher.replay_endpoint) as reader:  # the next one is served
            assert len([*reader.replay(390)]) == 11
    finally:
        stalled.destroy(0)
    eventually(lambda: publisher.replays == ReplayCounters(num_whole=1, num_abandoned=1))


def test_a_replay_takes_only_so_long(
    make_publisher: Callable[..., KvEventPublisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "REPLAY_S", 0.0)
    publisher = make_publisher()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        reader = context.socket(zmq.DEALER)
        reader.connect(publisher.replay_endpoint)
        reader.send_multipart([b"", bytes(8)])
        eventually(lambda: publisher.replays == ReplayCounters(num_abandoned=1))
    finally:
        context.destroy(0)


def test_a_place_that_is_taken_is_refused(make_publisher: Callable[..., KvEventPublisher]) -> None:
    taken = make_publisher()
    for more in ({"endpoint": taken.endpoint}, {"replay_endpoint": taken.replay_endpoint}):
        with pytest.raises(InvalidSetting, match="cannot listen at tcp://"):
            make_publisher(**more)


def test_an_indexer_of_another_machine_is_dialled(make_publisher: Callable[..., KvEventPublisher]) -> None:
    """As llm-d has it: the publisher dials, and the indexer listens."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        indexer = context.socket(zmq.SUB)
        indexer.subscribe(b"kv@")
        port = indexer.bind_to_random_port("tcp://127.0.0.1")
        batches = LargeBatches(make_publisher(endpoint=f"tcp://{socket.gethostname()}:{port}", replay_endpoint=None))
        deadline_s = time.monotonic() + WAIT_S
        while not indexer.poll(20) and time.monotonic() < deadline_s:
            batches.publish()
        assert indexer.recv_multipart()[0] == b"kv@pod@model"
    finally:
        context.destroy(0)


def test_a_request_for_a_replay_is_short(make_publisher: Callable[..., KvEventPublisher]) -> None:
    """Who sends more is cut off: nobody has to say who they are."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        reader = context.socket(zmq.DEALER)
        cut_off = reader.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        reader.connect(make_publisher().replay_endpoint)
        reader.send_multipart([b"", bytes(5_000)])
        assert cut_off.poll(int(WAIT_S * 1000))
    finally:
        context.destroy(0)


def test_it_listens_at_an_address_of_ipv6_where_there_is_one(make_publisher: Callable[..., KvEventPublisher]) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        with pytest.raises(InvalidSetting):
            make_publisher(endpoint="tcp://[::1]:0")
    else:
        assert make_publisher(endpoint="tcp://[::1]:0").endpoint.startswith("tcp://[::1]:")
