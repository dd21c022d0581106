"""Streams that can be resumed: journals of those that run, and of those that broke off or ended a short time ago.

A journal has what began a stream and everything that came from the nodes, each time before it is written to the client.
So whoever has a journal can make the same events again, drop those that the client has, and go on where the last one
ended, as an attempt that continues after other tokens. That makes no difference between a connection that broke and a
router that died.

Owns the journals, who may resume one, and when it is forgotten: `keep_s` after its connection ended. Bounds: of all
journals together `MAX_BYTES` and `MAX_STREAMS`, of one `MAX_STREAM_BYTES`. For a new one the oldest that nobody reads
are forgotten; where that is not enough, or the disk is full, a stream goes on and cannot be resumed.

Invariants: a journal is found by its unguessable id together with the name of the API key that began it; it has one
reader at a time, the last to come.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.router.http.resume.logs import Log, LogPlace
from baton.router.http.resume.records import Past, StreamHead, ToldFigures, pack, unpack_head, unpack_past
from baton.router.requests.output import Delivery
from baton.wire.errors import StreamNotFound

MAX_STREAMS = 4096
MAX_BYTES = 256 * 2**20
MAX_STREAM_BYTES = 32 * 2**20
_TAKE_OVER_S = 5.0
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Kept:
    """The journal of one stream. `break_off` ends the connection of its reader, None when nobody reads."""

    stream_id: str
    log: Log
    break_off: Callable[[], None] | None = None
    has_ended: bool = False
    is_forgotten: bool = False
    released: asyncio.Event = field(default_factory=asyncio.Event)
    expiry: asyncio.TimerHandle | None = None


class Streams(Collector):
    """The journals of one router, kept for `keep_s` seconds after their connections ended. Lives on one event loop."""

    def __init__(self, place: LogPlace, keep_s: float) -> None:
        self._place = place
        self._keep_s = keep_s
        self._kept: dict[str, Kept] = {}
        self._num_bytes = 0
        self._num_resumed = self._num_refused = 0
        for stream_id, log in place.found(keep_s):
            self._kept[stream_id] = kept = Kept(stream_id, log)
            self._num_bytes += log.num_bytes
            self._forget_later(kept)

    def begin(self, head: StreamHead) -> Kept | None:
        """Begin a journal. None when there is no room for it: the stream cannot be resumed."""
        data = pack(head)
        if not self._make_room(len(data), num_streams=1):
            self._num_refused += 1
            return None
        kept = Kept(head.stream_id, self._place.create(head.stream_id))
        self._kept[head.stream_id] = kept
        self._append(kept, data)  # forgets it when it cannot be written
        return None if kept.is_forgotten else kept

    def add(self, kept: Kept, deliveries: ToldFigures | Sequence[tuple[int, Delivery]]) -> None:
        """Write down what is going to be written to the client."""
        if not kept.is_forgotten:
            self._append(kept, pack(deliveries))

    async def find(self, stream_id: str, owner: str) -> tuple[Kept, StreamHead]:
        """The journal of a stream. Raises `StreamNotFound`, for the stream of another owner too."""
        kept = self._kept.get(stream_id)
        if kept is None:
            raise _not_found()
        try:
            head = unpack_head(await asyncio.to_thread(kept.log.read))
        except (OSError, ValueError):
            raise _not_found() from None
        if head.owner != owner:
            raise _not_found()
        return kept, head

    async def take_up(self, kept: Kept) -> Past:
        """What the stream has had so far, once no other connection reads it. Raises `StreamNotFound`."""
        while True:
            try:
                async with asyncio.timeout(_TAKE_OVER_S):
                    while kept.break_off is not None:
                        kept.break_off()
                        await kept.released.wait()
                past = await asyncio.to_thread(lambda: unpack_past(kept.log.read()))
            except (OSError, ValueError):  # TimeoutError is an OSError
                raise _not_found() from None
            if kept.is_forgotten:
                raise _not_found()
            if kept.break_off is None:  # otherwise somebody else was faster
                self._num_resumed += 1
                return past

    @contextlib.contextmanager
    def reading(self, kept: Kept, break_off: Callable[[], None]) -> Iterator[None]:
        """A connection has this stream as long as the block lasts."""
        kept.break_off = break_off
        kept.released.clear()
        if kept.expiry is not None:
            kept.expiry.cancel()
        try:
            yield
        finally:
            kept.break_off = None
            kept.log.rest()
            kept.released.set()
            self._forget_later(kept)

    def forget(self, stream_id: str) -> None:
        """Its answer was deleted: a stream that nobody reads cannot be resumed any more."""
        kept = self._kept.get(stream_id)
        if kept is not None and kept.break_off is None:
            self._forget(kept)

    def close(self) -> None:
        """Forget the streams that have ended; the others stay for the next router if their place does."""
        for kept in list(self._kept.values()):
            if kept.expiry is not None:
                kept.expiry.cancel()
            if kept.has_ended:
                self._forget(kept)
            kept.log.rest()
        self._place.close()

    def collect(self) -> Iterable[Metric]:
        """How many journals there are, their bytes, and what became of streams."""
        yield GaugeMetricFamily("baton:stream_journals", "Streams that can be resumed", len(self._kept))
        yield GaugeMetricFamily("baton:stream_journal_bytes", "Size of their journals", self._num_bytes)
        yield CounterMetricFamily("baton:streams_resumed", "Streams that were resumed", self._num_resumed)
        doc = "Streams that cannot be resumed because there was no room for their journal"
        yield CounterMetricFamily("baton:streams_without_journal", doc, self._num_refused)

    def _append(self, kept: Kept, data: bytes) -> None:
        try:
            if kept.log.num_bytes + len(data) > MAX_STREAM_BYTES or not self._make_room(len(data)):
                raise OSError(f"all journals together may have {MAX_BYTES} bytes, each {MAX_STREAM_BYTES}")
            kept.log.append(data)
            self._num_bytes += len(data)
        except OSError as error:
            self._num_refused += 1
            _log.warning("a stream cannot be resumed: its journal cannot be written: %s", error.strerror or error)
            self._forget(kept)

    def _make_room(self, num_bytes: int, num_streams: int = 0) -> bool:
        while len(self._kept) + num_streams > MAX_STREAMS or self._num_bytes + num_bytes > MAX_BYTES:
            idle = next((kept for kept in self._kept.values() if kept.break_off is None), None)
            if idle is None:
                return False
            self._forget(idle)
        return True

    def _forget_later(self, kept: Kept) -> None:
        if not kept.is_forgotten:
            # the last to end is the last to be forgotten when room is needed
            self._kept[kept.stream_id] = self._kept.pop(kept.stream_id)
            kept.expiry = asyncio.get_running_loop().call_later(self._keep_s, self._forget, kept)

    def _forget(self, kept: Kept) -> None:
        if kept.expiry is not None:
            kept.expiry.cancel()
        if self._kept.pop(kept.stream_id, None) is not None:
            self._num_bytes -= kept.log.num_bytes
        kept.is_forgotten = True
        with contextlib.suppress(OSError):
            kept.log.remove()


def _not_found() -> StreamNotFound:
    return StreamNotFound("there is no such stream, or it is too long ago, so that it cannot be resumed")
