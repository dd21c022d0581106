from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import zmq

from engine.api.codec import Codec
from engine.api.errors import TransferFailed
from kvtransfer.messages import Endpoint, HandoffName
from kvtransfer.transports import tcp_zmq
from kvtransfer.transports.base import Blocks, Move
from kvtransfer.transports.tcp_zmq import BlockBatch, ZmqReceiver, ZmqSender
from tests.kvtransfer.pair import SETTINGS
from tests.kvtransfer.pools import BLOCK_BYTES, key_of

_HEADERS = Codec(BlockBatch)
_GRANTED, _GENERATIONS = (5, 2, 7), (4, 4, 9)
_PUSH = """
import sys, time
import numpy as np
import zmq
from engine.api.links import LinkSettings
from kvtransfer.messages import Endpoint
from kvtransfer.transports.base import Move
from kvtransfer.transports.tcp_zmq import ZmqSender
source = np.arange(4 * 128, dtype=np.uint32).astype(np.uint8).reshape(4, 128)
sender = ZmqSender(zmq.Context(), Endpoint("zmq", sys.argv[1]), source, LinkSettings())
sender.push(((1).to_bytes(16, "big"), 1), [Move(i, i, t, g) for i, t, g in ((0, 5, 4), (1, 2, 4), (2, 7, 9))])
sys.stdin.read()
"""


class Target:
    """A receiver with one grant, and a raw socket to it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.context = context
        self.blocks: Blocks = np.full((8, BLOCK_BYTES), 0xA5, dtype=np.uint8)
        self.receiver = ZmqReceiver(context, "127.0.0.1", self.blocks, SETTINGS)
        self.receiver.expect(key_of(1), _GRANTED, _GENERATIONS)
        self.raw = context.socket(zmq.PUSH)
        self.raw.connect(self.receiver.endpoint.address)

    def send(
        self,
        payloads: Sequence[bytes],
        *,
        number: int = 1,
        first_index: int = 0,
        block_ids: tuple[int, ...] = _GRANTED,
        generations: tuple[int, ...] = _GENERATIONS,
    ) -> None:
        batch = BlockBatch(HandoffName(*key_of(number)), first_index, block_ids, generations)
        self.raw.send_multipart([_HEADERS.encode(batch), *payloads])

    def poll_until(self, num_refused: int, num_missing: int) -> None:
        deadline_s = time.monotonic() + 5
        wanted = (num_refused, num_missing)
        while (self.receiver.num_refused, self.receiver.num_missing(key_of(1))) != wanted:
            assert time.monotonic() < deadline_s, (self.receiver.num_refused, self.receiver.num_missing(key_of(1)))
            self.receiver.poll()
            time.sleep(0.001)

    @property
    def is_untouched(self) -> bool:
        return bool((self.blocks == 0xA5).all())


@pytest.fixture
def target() -> Iterator[Target]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    target = Target(context)
    yield target
    target.receiver.close()
    context.destroy(linger=0)


def payload(num_blocks: int = 3) -> bytes:
    return bytes(num_blocks * BLOCK_BYTES)


def test_what_was_granted_is_taken_in_one_frame_or_several(target: Target) -> None:
    target.send([payload(1)], block_ids=(5,), generations=(4,))
    target.send([payload(1), payload(1)], first_index=1, block_ids=(2, 7), generations=(4, 9))
    target.poll_until(num_refused=0, num_missing=0)
    assert not target.blocks[list(_GRANTED)].any()


@pytest.mark.parametrize(
    "change",
    [
        {"number": 2},
        {"generations": (4, 4, 8)},
        {"block_ids": (5, 2, 6)},
        {"block_ids": (2, 5, 7)},
        {"first_index": 1},
        {"first_index": 2**40},
        {"block_ids": (), "generations": ()},
        {"block_ids": (5, 2), "generations": (4, 4)},
        {"block_ids": (5, 2, 7, 1), "generations": (4, 4, 9, 1)},
    ],
    ids=str,
)
def test_what_no_grant_announced_is_refused_and_counted(target: Target, change: dict[str, int]) -> None:
    target.send([payload()], **change)  # type: ignore[arg-type]
    target.poll_until(num_refused=1, num_missing=3)
    assert target.is_untouched


@pytest.mark.parametrize("size", [0, 1, 3 * BLOCK_BYTES - 1, 3 * BLOCK_BYTES + 1, 2 * BLOCK_BYTES, 4 * BLOCK_BYTES])
def test_a_wrong_size_is_refused(target: Target, size: int) -> None:
    target.send([bytes(size)])
    target.poll_until(num_refused=1, num_missing=3)
    assert target.is_untouched


def test_frames_that_only_add_up_are_refused(target: Target) -> None:
    target.send([bytes(BLOCK_BYTES // 2), bytes(2 * BLOCK_BYTES), bytes(BLOCK_BYTES // 2)])
    target.send([])
    target.poll_until(num_refused=2, num_missing=3)
    assert target.is_untouched


def test_damaged_headers_are_refused(target: Target) -> None:
    target.raw.send_multipart([b"", payload()])
    target.raw.send_multipart([b"BT" + bytes(40), payload()])
    target.poll_until(num_refused=2, num_missing=3)
    assert target.is_untouched


def test_a_doubled_message_is_written_once(target: Target) -> None:
    target.send([payload()])
    target.poll_until(num_refused=0, num_missing=0)
    target.blocks[:] = 0xA5
    target.send([payload()])
    target.poll_until(num_refused=1, num_missing=0)
    assert target.is_untouched


def test_nothing_is_taken_after_forget(target: Target) -> None:
    target.receiver.forget(key_of(1))
    target.send([payload()])
    target.poll_until(num_refused=1, num_missing=0)
    assert target.is_untouched


def test_another_process_sends(target: Target) -> None:
    command = [sys.executable, "-c", _PUSH, target.receiver.endpoint.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as sender:
        target.poll_until(num_refused=0, num_missing=0)
        sender.communicate(b"")
    sent = np.arange(4 * 128, dtype=np.uint32).astype(np.uint8).reshape(4, 128)
    assert (target.blocks[list(_GRANTED)] == sent[:3]).all()
    assert (target.blocks[[0, 1, 3, 4, 6]] == 0xA5).all()


def test_large_pushes_are_cut_into_bounded_messages(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    monkeypatch.setattr(tcp_zmq, "_MAX_MESSAGE_BYTES", 2 * BLOCK_BYTES)
    source: Blocks = np.zeros((3, BLOCK_BYTES), dtype=np.uint8)
    sender = ZmqSender(target.context, target.receiver.endpoint, source, SETTINGS)
    moves = [Move(i, i, t, g) for i, (t, g) in enumerate(zip(_GRANTED, _GENERATIONS, strict=True))]
    sender.push(key_of(1), moves)
    assert target.receiver.socket is not None
    frames = target.receiver.socket.recv_multipart()
    assert [len(frame) for frame in frames[1:]] == [2 * BLOCK_BYTES]
    sender.close()


def test_a_receiver_that_takes_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    monkeypatch.setattr(tcp_zmq, "_SEND_TIMEOUT_MS", 50)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and never listens
        address = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        sender = ZmqSender(target.context, Endpoint("zmq", address), target.blocks, SETTINGS)
        with pytest.raises(TransferFailed, match="took nothing"):
            sender.push(key_of(1), [Move(0, 0, 0, 1)])
        sender.close()


@pytest.mark.parametrize("address", ["", "inproc://x", "tcp://a b:5", "tcp://host", "tcp://127.0.0.1:99999"])
def test_addresses_that_cannot_be_dialled_are_refused(target: Target, address: str) -> None:
    with pytest.raises(TransferFailed, match="cannot be dialled"):
        ZmqSender(target.context, Endpoint("zmq", address), target.blocks, SETTINGS)
