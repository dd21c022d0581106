"""A reader of KV events, made from the frames that vLLM 0.32 has sent (`vllm_0_32.json`): an indexer in small.

It knows no type of Baton. What it does not understand is an error.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

END = b"\xff" * 8
WAIT_S = 10.0
MEDIA = ("GPU", "CPU", "STORAGE")
_OPTIONAL = {"group_idx", "kv_cache_spec_kind", "extra_keys"}
_FIELDS = {
    "BlockStored": {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"},
    "BlockRemoved": {"block_hashes", "medium"},
    "AllBlocksCleared": set(),
}


@dataclass(frozen=True)
class Block:
    """What is known of a block."""

    parent: int | None
    token_ids: tuple[int, ...]
    extra_keys: object = None


@dataclass
class View:
    """The blocks that somebody has, by medium and hash."""

    media: defaultdict[str, dict[int, Block]] = field(default_factory=lambda: defaultdict(dict))

    @property
    def blocks(self) -> dict[int, Block]:
        """Those in the pool."""
        return self.media["GPU"]

    def apply(self, payload: bytes) -> None:
        """Take a batch in."""
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert isinstance(ts, float)
        assert rank == 0
        for event in events:
            kind = event.pop("type")
            assert _FIELDS[kind] <= set(event) <= _FIELDS[kind] | _OPTIONAL
            assert event.get("medium", "GPU") in MEDIA
            if kind == "AllBlocksCleared":
                self.media.clear()
            elif kind == "BlockRemoved":
                for block_hash in event["block_hashes"]:
                    self.media[event["medium"]].pop(block_hash, None)
            else:
                self._store(event)

    def _store(self, event: dict[str, Any]) -> None:
        size, hashes, tokens = event["block_size"], event["block_hashes"], event["token_ids"]
        assert len(tokens) == size * len(hashes)
        extra_keys = event.get("extra_keys") or [None] * len(hashes)
        parent, held = event["parent_block_hash"], self.media[event["medium"]]
        for number, (block_hash, extra) in enumerate(zip(hashes, extra_keys, strict=True)):
            assert 0 <= block_hash < 2**64
            held[block_hash] = Block(parent, tuple(tokens[number * size : (number + 1) * size]), extra)
            parent = block_hash


class Reader:
    """Subscribes to `endpoint`, and asks `replay_endpoint` for what it has missed. `hwm`: frames that wait for it."""

    def __init__(self, endpoint: str, replay_endpoint: str = "", hwm: int = 1000) -> None:
        self.view = View()
        self.next_number = 0
        self._last_live = -1
        self.topics: set[bytes] = set()
        self.num_replays = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._subscriber, self._dealer = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._subscriber.setsockopt(zmq.RCVHWM, hwm)
        self._subscriber.setsockopt(zmq.RCVBUF, 16 * 1024)
        self._subscriber.subscribe(b"")
        self._subscriber.connect(endpoint)
        if replay_endpoint:
            self._dealer.connect(replay_endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._context.destroy(0)

    def receive(self, wait_s: float = WAIT_S) -> Sequence[bytes]:
        """The next frames that are published. Raises `TimeoutError`."""
        if not self._subscriber.poll(int(wait_s * 1000)):
            raise TimeoutError("nothing was published")
        return self._subscriber.recv_multipart()

    def catch_up(self, wait_s: float = 0.2) -> None:
        """Take in what is there, and what a replay has behind it."""
        with suppress(TimeoutError):
            while True:
                self.take(self.receive(wait_s))
        self._take_replay()

    def read_until(self, number: int) -> None:
        """Take all in that is published, and a replay where numbers are missing, until the batch `number` was."""
        deadline_s = time.monotonic() + WAIT_S
        while self.next_number <= number:
            assert time.monotonic() < deadline_s
            self.take(self.receive())

    def take(self, frames: Sequence[bytes]) -> None:
        """Take the frames of one batch in."""
        topic, number_bytes, payload = frames
        number = int.from_bytes(number_bytes, "big")
        self.topics.add(topic)
        if number <= self._last_live:  # another life, whose numbers begin again
            self.next_number = 0
        self._last_live = number
        if number > self.next_number:
            self._take_replay()
        self._apply(number, payload)

    def _take_replay(self) -> None:
        for each in self.replay(self.next_number):
            self._apply(*each)

    def replay(self, first: int) -> Iterable[tuple[int, bytes]]:
        """What the publisher still has from this number on."""
        self.num_replays += 1
        self._dealer.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            assert self._dealer.poll(int(WAIT_S * 1000)), "the replay did not end"
            empty, topic, number, payload = self._dealer.recv_multipart()
            assert empty == b""
            if number == END:
                assert (topic, payload) == (b"", b"")
                return
            self.topics.add(topic)
            yield int.from_bytes(number, "big"), payload

    def _apply(self, number: int, payload: bytes) -> None:
        if number >= self.next_number:
            self.view.apply(payload)
            self.next_number = number + 1
