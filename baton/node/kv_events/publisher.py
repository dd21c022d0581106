"""Publishes the events of a node's KV pool, and of the tiers below it, as vLLM's ZMQ publisher does.

Owns the sockets, the numbers of batches, and the batches that are kept for those who have missed some. A batch is
three frames: topic, number in 8 bytes, payload. Numbers begin at 0 with the node, and so does every reader's view,
because the first batch says that nothing is there.

Publishing never waits: a batch is encoded, kept and handed to ZMQ by the engine's thread, and a reader that is too slow
loses it. It notices by the numbers, and asks for a replay, which has a thread and limits of its own.

Nothing is encrypted, and nobody has to say who they are: whoever can reach the endpoints reads the tokens of prompts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import zmq

from baton.engine.cache.block_log import PublishedRun
from baton.engine.cache.block_pool import CacheChanges
from baton.engine.cache.tiers import Tier
from baton.node.kv_events.config import FLAG, KvEventsConfig, listens
from baton.node.kv_events.events import AllBlocksCleared, BlockCounters, Event, EventBatch, PoolEvents
from baton.node.kv_events.tier_events import TierEvents, follow
from baton.wire.errors import InvalidSetting
from baton.wire.links import LinkSettings, open_socket

NUMBER_BYTES = 8
END_OF_REPLAY = b"\xff" * NUMBER_BYTES
REPLAY_S = 10.0
"""The longest that a replay takes; whoever reads more slowly does not get all of it."""
STALL_MS = 1_000
"""How long the reader of a replay may take nothing."""
_MAX_REQUEST_BYTES = 4_096
"""Of what readers send: topics, and numbers of batches."""
_MAX_QUEUED_REPLAY = 100
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ReplayCounters:
    """Replays by their end. Those that are `cut` asked for batches that are no longer kept, and got the rest."""

    num_whole: int = 0
    num_cut: int = 0
    num_abandoned: int = 0


class KvEventPublisher:
    """A `BlockLog` that publishes what it hears. Raises `InvalidSetting` where it cannot listen. `tiers`: below the
    pool of `num_blocks`. `clock`: tells people the time of a batch."""

    def __init__(
        self,
        config: KvEventsConfig,
        block_size: int,
        adapters: Mapping[bytes, str],
        tiers: Sequence[Tier] = (),
        num_blocks: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._events = PoolEvents(block_size, adapters)
        followed = follow(tiers)
        self._tier_events = TierEvents(followed, num_blocks, self._events.counters) if followed else None
        self._clock = clock
        self._topic = config.topic.encode()
        self._encode = msgspec.msgpack.Encoder().encode
        self._kept = _KeptBatches(0 if config.replay_endpoint is None else config.buffer_steps)
        self._replays: _Replays | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        limits = LinkSettings(max_message_bytes=_MAX_REQUEST_BYTES, max_queued_messages=config.hwm)
        self._link = open_socket(self._context, zmq.PUB, limits)
        try:
            self.endpoint = _opened(self._link, config.endpoint)
            if config.replay_endpoint is not None:
                self._replays = _Replays(self._context, config.replay_endpoint, self._topic, self._kept)
        except InvalidSetting:
            self._context.destroy(linger=0)
            raise
        _log.info("KV events at %s, replays at %s, not encrypted", self.endpoint, self.replay_endpoint or "no place")
        self._publish([AllBlocksCleared()])

    @property
    def replay_endpoint(self) -> str:
        """Where replays can be asked for; "" where they cannot."""
        return "" if self._replays is None else self._replays.endpoint

    @property
    def num_batches(self) -> int:
        """Batches since the start: the number of the next one."""
        return self._kept.end

    @property
    def blocks(self) -> BlockCounters:
        """What became of blocks."""
        return self._events.counters

    @property
    def replays(self) -> ReplayCounters:
        """What became of those who have missed something."""
        return ReplayCounters() if self._replays is None else self._replays.counters

    def published(self, run: PublishedRun) -> None:
        """Hear of blocks that a request has filled."""
        self._events.published(run)

    def changed(self, changes: CacheChanges) -> None:
        """Publish what these changes are to others."""
        events = self._events.changed(changes)
        if self._tier_events is not None:
            events += self._tier_events.behind(events)
        if events:
            self._publish(events)

    def close(self) -> None:
        """End the thread and close the sockets. What was not sent yet is lost."""
        self._link.close()
        self._context.term()  # which ends the thread, and waits for its socket

    def _publish(self, events: Sequence[Event]) -> None:
        payload = self._encode(EventBatch(self._clock(), events))
        # kept first, so that whoever sees the number can have all before it
        number = self._kept.add(payload)
        self._link.send_multipart((self._topic, number, payload), zmq.NOBLOCK)


class _KeptBatches:
    """The last batches: the engine's thread adds to them, and that of replays reads them."""

    def __init__(self, most: int) -> None:
        self._batches: deque[tuple[bytes, bytes]] = deque(maxlen=most)
        self._lock = threading.Lock()
        self.end = 0

    def add(self, payload: bytes) -> bytes:
        """Keep a batch, and forget the oldest if there are too many. Its number."""
        number = self.end.to_bytes(NUMBER_BYTES, "big")
        with self._lock:
            self._batches.append((number, payload))
            self.end += 1
        return number

    def since(self, number: int) -> tuple[list[tuple[bytes, bytes]], bool]:
        """The batches from `number` on, as far as they are kept, and whether all of them are."""
        with self._lock:
            batches, end = [*self._batches], self.end
        first = end - len(batches)
        return batches[max(0, number - first) :], number >= first


class _Replays:
    """Answers those who have missed batches, in a thread of its own, one after another. Ends with its context."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, topic: bytes, kept: _KeptBatches
    ) -> None:
        self.counters = ReplayCounters()
        self._topic = topic
        self._kept = kept
        limits = LinkSettings(max_message_bytes=_MAX_REQUEST_BYTES, max_queued_messages=_MAX_QUEUED_REPLAY)
        self._link = open_socket(context, zmq.ROUTER, limits)
        self._link.setsockopt(zmq.SNDTIMEO, STALL_MS)
        self.endpoint = _opened(self._link, endpoint)
        threading.Thread(target=self._run, name="kv-events", daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                self._answer(self._link.recv_multipart())
        except zmq.ContextTerminated:
            pass
        finally:
            self._link.close()

    def _answer(self, request: Sequence[bytes]) -> None:
        """[reader, "", first number] gets [reader, "", topic, number, payload] for each batch, then an end with no
        topic and no payload."""
        if len(request) != 3 or len(request[2]) != NUMBER_BYTES:
            return
        reader, batches, is_whole = request[0], *self._kept.since(int.from_bytes(request[2], "big"))
        deadline_s = time.monotonic() + REPLAY_S
        try:
            for number, payload in batches:
                if time.monotonic() >= deadline_s:
                    raise zmq.Again
                self._link.send_multipart((reader, b"", self._topic, number, payload))
            self._link.send_multipart((reader, b"", b"", END_OF_REPLAY, b""))
        except zmq.ZMQError:  # the reader has left, or takes nothing; or this publisher ends
            self.counters.num_abandoned += 1
            return
        self.counters.num_whole += is_whole
        self.counters.num_cut += not is_whole


def _opened(link: zmq.Socket[bytes], endpoint: str) -> str:
    """Listen at `endpoint`, or dial it if it is not of this machine; the address as it came out."""
    if "[" in endpoint:
        link.setsockopt(zmq.IPV6, 1)
    if not listens(endpoint):
        link.connect(endpoint)
        return endpoint
    try:
        link.bind(endpoint)
    except zmq.ZMQError as error:
        raise InvalidSetting(f"{FLAG}: cannot listen at {endpoint}: {error}") from None
    return link.getsockopt_string(zmq.LAST_ENDPOINT)
