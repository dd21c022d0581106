"""A KV store on a Valkey or Redis server, which several nodes share: what one has computed, the others load.

Owns the blocks that wait to be written, what is known of the server for a short while, and two threads: one that reads
and one that writes. What is said to the server is known to `ValkeyServer`.

Whether a block is on the server can only be asked there. So `lookup` takes it for granted, unless the answer is known,
and a load ends at the first block that is missing: a prompt that nobody has seen waits for one answer.

Invariants:
- no call waits for the server. What it cannot take is dropped, and counted;
- the reading thread takes a few blocks of each load in turn, so that nobody waits for another one's long prompt. At
  first it takes very few, and then twice as many each time: how soon a load begins says how far the server is away;
- after a fault all calls fail at once until the writing thread has reached the server again: no request is a trial.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from baton.engine.cache.fault_log import FaultLog
from baton.engine.cache.store import REST_S, Landing, StoredBlock, TierCounters
from baton.engine.cache.valkey_server import ServerFault, ValkeyServer, decoded, encoded

_FIRST_BYTES, _BATCH_BYTES = 2**18, 2**23
"""What is asked for at once, at the beginning of a load and at most. A node does not load what begins so late that it
would have computed a tenth meanwhile, and with large pieces that would be every short prefix."""
_PENDING_BYTES = 2**28
_MAX_WAITING = 256
_MAX_KNOWN = 2**16
_THERE_S, _MISSING_S = 60.0, 5.0
"""For so long it is known that the server has a block, or has it not: the first saves writing, the second asking."""
_TICK_S = 0.5
_PAUSE_S, _MAX_PAUSE_S = 0.5, 30.0
"""Between two trials to reach the server: at first, and twice as long after each, up to the second."""
_CLOSE_S = 5.0
_KEEPING = "keeping"
_log = logging.getLogger(__name__)


class _Order(NamedTuple):
    hashes: Sequence[bytes]
    landing: Landing
    num_at_once: int


class _Known:
    """What the server is known to have, and not to have. The oldest of what is too much is forgotten."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answers: OrderedDict[bytes, tuple[bool, float]] = OrderedDict()

    def get(self, block_hash: bytes) -> bool | None:
        """Whether the block is there; None: nobody knows."""
        is_there, until_s = self._answers.get(block_hash, (None, 0.0))
        return is_there if self._clock() < until_s else None

    def note(self, block_hash: bytes, *, is_there: bool) -> None:
        """The server has it, or has it not."""
        self._answers.pop(block_hash, None)
        self._answers[block_hash] = is_there, self._clock() + (_THERE_S if is_there else _MISSING_S)
        if len(self._answers) > _MAX_KNOWN:
            self._answers.popitem(last=False)

    def drop(self, block_hash: bytes) -> None:
        """Whatever was known is no longer true."""
        self._answers.pop(block_hash, None)


class ValkeyStore:
    """Blocks on `server`. `counters`: of blocks that were dropped, and that were none."""

    def __init__(
        self, server: ValkeyServer, counters: TierCounters, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._server = server
        self._counters = counters
        self._clock = clock
        self._most_at_once = max(1, _BATCH_BYTES // server.kind.block_bytes)
        self._first_at_once = min(self._most_at_once, max(1, _FIRST_BYTES // server.kind.block_bytes))
        self._max_pending = max(1, _PENDING_BYTES // server.kind.block_bytes)
        self._pending: dict[bytes, memoryview] = {}
        self._condemned: set[bytes] = set()
        self._known = _Known(clock)
        self._fault = ""
        self._faults = FaultLog(f"the KV store {server.name}", clock)
        self._pause_s, self._tries_at_s, self._refused_until_s = _PAUSE_S, 0.0, 0.0
        self._is_closed = False
        self._lock = threading.Lock()
        self._orders: queue.Queue[_Order | None] = queue.Queue(_MAX_WAITING)
        self._jobs: queue.Queue[bytes | None] = queue.Queue(self._max_pending + _MAX_WAITING)
        self._threads = [
            threading.Thread(target=self._serve, name="valkey-read", daemon=True),
            threading.Thread(target=self._keep_up, name="valkey-write", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def usage(self) -> float:
        """Nobody can say: others share the server."""
        return 0.0

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """How many of these blocks are not known to be missing, from the first on. Raises `ServerFault`."""
        self._require_server()
        with self._lock:
            missing = (each not in self._pending and self._known.get(each) is False for each in hashes)
            return next((place for place, is_missing in enumerate(missing) if is_missing), len(hashes))

    def holds(self, block_hash: bytes) -> bool:
        """Whether a block is known to be there, or waits to be written. Raises `ServerFault`."""
        self._require_server()
        with self._lock:
            return block_hash in self._pending or self._known.get(block_hash) is True

    def put(self, block: StoredBlock) -> None:
        """Have the writing thread keep a block, if there is room. Raises `ServerFault`."""
        if self.holds(block.block_hash):
            return
        if len(self._pending) >= self._max_pending or self._clock() < self._refused_until_s:
            self._counters.num_dropped_blocks += 1
            return
        value = encoded(block)
        with self._lock:
            self._pending[block.block_hash] = value
            self._known.drop(block.block_hash)
        self._ask_writer(block.block_hash)

    def load(self, hashes: Sequence[bytes], landing: Landing) -> None:
        """Have the reading thread hand over these blocks, one after another. Raises `ServerFault`."""
        self._require_server()
        self._enqueue(_Order(hashes, landing, self._first_at_once))

    def forget(self, block_hash: bytes) -> None:
        """Have the writing thread remove a block from the server."""
        with self._lock:
            self._pending.pop(block_hash, None)
            if len(self._condemned) < _MAX_WAITING:
                self._condemned.add(block_hash)
            self._known.note(block_hash, is_there=False)
        self._ask_writer(block_hash)

    def close(self) -> None:
        """End the threads, which wait for one answer at most. What was not written yet is lost."""
        self._is_closed = True
        for waiting in (self._orders, self._jobs):
            with suppress(queue.Full):
                waiting.put_nowait(None)
        for thread in self._threads:
            thread.join(_CLOSE_S)
        self._server.close()

    def _require_server(self) -> None:
        if self._fault:
            raise ServerFault(f"{self._server.name}: {self._fault}")

    def _ask_writer(self, block_hash: bytes) -> None:
        """Have the writing thread look at a block."""
        try:
            self._jobs.put_nowait(block_hash)
        except queue.Full:
            self._drop((block_hash,))

    def _drop(self, hashes: Iterable[bytes]) -> None:
        """These blocks are not written."""
        with self._lock:
            dropped = [each for each in hashes if self._pending.pop(each, None) is not None]
        self._counters.num_dropped_blocks += len(dropped)

    def _failed(self, fault: ServerFault) -> None:
        """Leave the server alone, longer after each trial in vain."""
        if not self._fault:
            _log.warning("the KV store %s is not used until it can be reached: %s", self._server.name, fault)
        self._fault = str(fault)
        self._tries_at_s = self._clock() + self._pause_s
        self._pause_s = min(_MAX_PAUSE_S, 2 * self._pause_s)

    def _enqueue(self, order: _Order) -> None:
        try:
            self._orders.put_nowait(order)
        except queue.Full:
            order.landing.ended()

    # the reading thread

    def _serve(self) -> None:
        while not self._is_closed:
            if (order := self._orders.get()) is not None:
                self._take_turn(order)
        with suppress(queue.Empty):
            while True:
                if (order := self._orders.get_nowait()) is not None:
                    order.landing.ended()

    def _take_turn(self, order: _Order) -> None:
        rest: Sequence[bytes] = ()
        try:
            if not (self._fault or order.landing.is_over):
                rest = self._deliver(order)
        except ServerFault as fault:
            self._failed(fault)
        except Exception:  # whatever became of the landing, others wait for this thread
            _log.exception("a load from %s failed", self._server.name)
        if rest:
            self._enqueue(_Order(rest, order.landing, min(2 * order.num_at_once, self._most_at_once)))
        else:
            order.landing.ended()

    def _deliver(self, order: _Order) -> Sequence[bytes]:
        """Hand over the first blocks of a load; those that are to come in another turn."""
        for block in self._blocks(order.hashes[: order.num_at_once]):
            if block is None or not order.landing.arrived(block):
                return ()
        return order.hashes[order.num_at_once :]

    def _blocks(self, hashes: Sequence[bytes]) -> list[StoredBlock | None]:
        """Each of these blocks, from memory if it is not written yet."""
        with self._lock:
            held = {each: value for each in hashes if (value := self._pending.get(each)) is not None}
            asked = [each for each in hashes if each not in held and self._known.get(each) is not False]
        found = {each: decoded(each, value, self._server.kind) for each, value in held.items()}
        if asked:
            fetched = self._server.fetch(asked)
            self._counters.num_damaged_blocks += fetched.num_damaged
            found.update(zip(asked, fetched.blocks, strict=True))
            with self._lock:
                for each in asked:
                    self._known.note(each, is_there=found[each] is not None)
        return [found.get(each) for each in hashes]

    # the writing thread

    def _keep_up(self) -> None:
        while not self._is_closed:
            batch = self._next_jobs()
            try:
                if not self._fault:
                    self._write(batch)
                    continue
                self._drop(batch)
                if self._clock() >= self._tries_at_s:
                    self._try_again()
            except ServerFault as fault:
                self._failed(fault)
            except Exception:  # others want to be written after these
                _log.exception("writing to %s failed", self._server.name)

    def _next_jobs(self) -> list[bytes]:
        """Blocks to look at, after at most a tick."""
        jobs: list[bytes | None] = []
        with suppress(queue.Empty):
            jobs.append(self._jobs.get(timeout=_TICK_S))
            while len(jobs) < self._most_at_once:
                jobs.append(self._jobs.get_nowait())
        return [each for each in jobs if each is not None]

    def _write(self, hashes: Sequence[bytes]) -> None:
        with self._lock:
            condemned = self._condemned.intersection(hashes)
            self._condemned -= condemned
            values = {each: value for each in hashes if (value := self._pending.get(each)) is not None}
        try:
            if condemned:
                self._server.remove(list(condemned))
            if values:
                self._written(values, self._server.keep(values))
        except Exception:
            self._drop(values)
            raise

    def _written(self, values: Mapping[bytes, memoryview], refused: Sequence[str]) -> None:
        """These blocks are on the server, apart from those that it has refused, for these reasons."""
        if refused:
            self._refused_until_s = self._clock() + REST_S
            self._counters.num_dropped_blocks += len(refused)
            self._faults.failed(_KEEPING, f"keeps nothing for {REST_S:g} s: {refused[0]}")
        else:
            self._faults.worked(_KEEPING)
        with self._lock:
            for block_hash, value in values.items():
                if self._pending.get(block_hash) is value:
                    del self._pending[block_hash]
                    if not refused:
                        self._known.note(block_hash, is_there=True)

    def _try_again(self) -> None:
        """Ask the server for something. Raises `ServerFault`."""
        self._server.probe()
        self._fault, self._pause_s = "", _PAUSE_S
        _log.info("the KV store %s is used again", self._server.name)
