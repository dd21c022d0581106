"""The other machines of a node as its driver sees them: it listens, they dial, and each runs a part of the ranks.

Owns the port, the thread that serves it, and the knowledge which machine has which ranks and whether it is there. To
`baton.ranks.executor.ranks` a rank elsewhere is a channel and a process like any other: this module cuts the channel
in the middle (`lanes`). Does not know what is said over it.

The driver takes the first machines that are there, as many as it needs, for one life of its own; others are turned
away, and may come again. A machine is lost when its connection breaks, or when it has said nothing for `SILENCE_S`:
then all its ranks have ended, for that reason, and with them the node. Nothing is said twice and no connection is
mended: a driver that starts again has another epoch, and takes machines that dial it anew.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from baton.engine.settings import EngineSettings
from baton.ranks.executor.spread import Machine
from baton.ranks.executor.starting import STOPPED, LocalRanks, RankFailed, StartedRank
from baton.ranks.machines.lanes import Key, Lanes, LanesBroken
from baton.ranks.machines.link import (
    BEAT_S,
    NUM_LANES,
    ORDERS,
    RECEIVING,
    SENDING,
    SILENCE_S,
    TO_DRIVER,
    TO_MACHINE,
    Beat,
    Closed,
    Data,
    Ended,
    Kill,
    Leave,
    Offer,
    Take,
    TurnAway,
)
from baton.wire import links
from baton.wire.errors import BatonError

MACHINES_TIMEOUT_S = 300.0
"""The time in which all machines of a node must have dialled."""
_BEAT_MS = int(BEAT_S * 1000)
_FRESH_S = 2 * BEAT_S + 1.0
_END_S = 5.0
_LINGER_MS = 500
_log = logging.getLogger(__name__)


class DistantRank:
    """A rank in a process of another machine. `is_stopped` is what that machine says; `silent_s`: for how many seconds
    it has said nothing."""

    pid = 0

    def __init__(self, number: int, machine: Machine, owner: RankMachines) -> None:
        self.number, self.machine = number, machine
        self.is_stopped = False
        self.silent_s = 0.0
        self._owner = owner
        self._how = ""
        self._has_ended = threading.Event()
        pairs = [socket.socketpair() for _ in range(NUM_LANES)]
        self.end_of_orders = pairs[ORDERS][0]
        self._transfer_ends = pairs[RECEIVING][0], pairs[SENDING][0]
        self._has_given_ends = False
        self.joined = [theirs for _, theirs in pairs]
        """The other ends, which are joined to the link."""

    @property
    def standing(self) -> str:
        """Why the rank stands still, for a message; "" when it does not."""
        if self.is_stopped:
            return STOPPED
        return f"has not been heard for {self.silent_s:.0f} s" if self.silent_s > _FRESH_S else ""

    def transfer_ends(self) -> tuple[tuple[socket.socket, socket.socket], Sequence[socket.socket]]:
        """The driver's ends of the lines. The rank's own ends lie on its machine."""
        self._has_given_ends = True
        return self._transfer_ends, ()

    def kill(self) -> None:
        self._owner.ask(Kill(self._owner.epoch, self.number))

    def wait(self, timeout_s: float) -> str:
        self._has_ended.wait(timeout_s)
        return self._how

    def end(self) -> None:
        if not self._has_ended.is_set():
            self.kill()
            self._has_ended.wait(_END_S)

    def close(self) -> None:
        """Close the ends that nobody has asked for."""
        if not self._has_given_ends:
            for end in self._transfer_ends:
                end.close()

    def note_end(self, how: str) -> None:
        """Note how the rank has ended; only the first call counts."""
        if not self._has_ended.is_set():
            self._how = how
            self._has_ended.set()


@dataclass(slots=True)
class _Taken:
    """A machine that runs ranks. `identity` and `descriptor`: of its connection."""

    machine: Machine
    identity: bytes
    descriptor: int
    ranks: list[DistantRank]
    heard_s: float
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class _Offered:
    offer: Offer
    descriptor: int
    heard_s: float


class RankMachines:
    """Starts ranks on `count` machines, this one among them, for one life of a driver. `local` starts those of this
    machine. Listens on `host`:`port`; raises `InvalidSetting` when that cannot be."""

    def __init__(
        self,
        count: int,
        local: LocalRanks,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: links.LinkSettings,
        host: str,
        port: int,
    ) -> None:
        self.here = local.here
        self.epoch = secrets.randbits(63)
        self._count, self._local = count, local
        self._socket, self.address = links.listen(context, zmq.ROUTER, host, port, settings)
        self._monitor: Any = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._lanes = Lanes(self._send_data, self._send_closed)
        self._taken: list[_Taken] = []
        self._by_number: dict[int, DistantRank] = {}
        self._asked: deque[Kill] = deque()
        self._wakeup, self._woken = socket.socketpair()
        self._closing = threading.Event()
        self._beat_s = 0.0
        self._thread = threading.Thread(target=self._serve, name="rank machines", daemon=True)

    def start(self, settings: EngineSettings) -> Sequence[StartedRank]:
        """Start the ranks of this machine, and those of the others once they are all there. Raises `RankFailed`."""
        here = settings.num_ranks_here
        offers = self._await_offers(self._count - 1, range(here, settings.num_ranks))
        local = self._local.start_some(settings, here - 1)
        distant: list[DistantRank] = []
        for number, (identity, offered) in enumerate(offers.items(), 1):
            ranks = range(number * here, (number + 1) * here)
            distant += self._take(number, identity, offered, ranks)
        self._thread.start()
        return [*local, *distant]

    def ask(self, order: Kill) -> None:
        """Have the thread say this. For other threads."""
        self._asked.append(order)
        with contextlib.suppress(OSError):  # it is over
            self._wakeup.send(b"\0")

    def close(self) -> None:
        """Leave all machines, and stop listening. A second call changes nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        with contextlib.suppress(OSError):
            self._wakeup.send(b"\0")
        if self._thread.ident is not None:
            self._thread.join(_END_S)
        for taken in self._taken:
            self._say(taken, Leave(self.epoch))
            for rank in taken.ranks:
                rank.close()
        self._lanes.close_all()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=_LINGER_MS)
        self._wakeup.close()
        self._woken.close()

    # --- until all machines are there

    def _await_offers(self, wanted: int, numbers: range) -> dict[bytes, _Offered]:
        """The first machines to run ranks `numbers` on. Raises `RankFailed` at the deadline."""
        _log.info("waits for %d more machines: `baton rank --driver %s` on each", wanted, self.address)
        offers: dict[bytes, _Offered] = {}
        deadline_s = time.monotonic() + MACHINES_TIMEOUT_S
        while True:
            now_s = time.monotonic()
            fresh = {identity: each for identity, each in offers.items() if now_s - each.heard_s < _FRESH_S}
            if len(fresh) >= wanted:
                return dict(list(fresh.items())[:wanted])
            if now_s >= deadline_s:
                there = ", ".join(each.offer.host for each in fresh.values()) or "none"
                first, last = numbers[len(fresh) * len(numbers) // wanted], numbers[-1]
                raise RankFailed(
                    f"{f'rank {last} has' if first == last else f'ranks {first} to {last} have'} no machine: "
                    f"{len(fresh)} of {wanted} dialled {self.address} within {MACHINES_TIMEOUT_S:g} s ({there})"
                )
            if self._socket.poll(_BEAT_MS):
                identity, descriptor, message = self._receive()
                if isinstance(message, Offer):
                    offers[identity] = _Offered(message, descriptor, time.monotonic())

    def _take(self, number: int, identity: bytes, offered: _Offered, numbers: range) -> list[DistantRank]:
        offer = offered.offer
        num_threads = max(1, offer.num_threads // len(numbers))
        machine = Machine(number, offer.host, offer.model, num_threads, offer.trusts_remote_code)
        ranks = [DistantRank(each, machine, self) for each in numbers]
        taken = _Taken(machine, identity, offered.descriptor, ranks, time.monotonic())
        self._taken.append(taken)
        for rank in ranks:
            self._by_number[rank.number] = rank
            for lane, end in enumerate(rank.joined):
                self._lanes.add((rank.number, lane), end)
        self._say(taken, Take(self.epoch, tuple(numbers)))
        _log.info("ranks %d to %d are on %s", numbers[0], numbers[-1], offer.host)
        return ranks

    # --- the thread

    def _serve(self) -> None:
        try:
            while not self._closing.is_set():
                self._turn()
        except Exception as error:  # nobody could catch it: the node ends, and its log says why
            _log.exception("the link to the other machines has failed")
            for taken in self._taken:
                self._lose(taken, f"the link has failed ({type(error).__name__})")

    def _turn(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._woken):
            poller.register(source, zmq.POLLIN)
        self._lanes.register(poller)
        events = poller.poll(_BEAT_MS)
        readable = [source for source, _ in events]
        if self._woken.fileno() in readable:
            self._woken.recv(4096)
            while self._asked:
                self._pass_on(self._asked.popleft())
        # before what comes by a new connection of the same descriptor
        while self._monitor.poll(0):
            self._on_disconnected(recv_monitor_message(self._monitor)["value"])
        while self._socket.poll(0):
            self._on_message(*self._receive())
        self._lanes.serve(events)
        now_s = time.monotonic()
        if now_s - self._beat_s >= BEAT_S:
            self._beat_s = now_s
            self._look_around(now_s)

    def _look_around(self, now_s: float) -> None:
        for taken in self._taken:
            self._say(taken, Beat(self.epoch, ()))
            silent_s = now_s - taken.heard_s
            for rank in taken.ranks:
                rank.silent_s = silent_s
            if silent_s > SILENCE_S:
                self._lose(taken, f"has not been heard for {SILENCE_S:g} s: its machine stands still, or is cut off")

    def _on_disconnected(self, descriptor: int) -> None:
        for taken in self._taken:
            if taken.descriptor == descriptor:
                self._lose(taken, "is gone: its `baton rank` has ended, or the connection broke")

    def _receive(self) -> tuple[bytes, int, object]:
        """(identity, descriptor of the connection, message); no message where it was none."""
        frames = self._socket.recv_multipart(copy=False)
        identity, descriptor = frames[0].bytes, int(frames[-1].get(zmq.SRCFD))
        try:
            return identity, descriptor, TO_DRIVER.decode(frames[-1].bytes)
        except BatonError as error:
            _log.warning("message from a machine rejected: %s", error)
            self._answer(identity, TurnAway(str(error)))
            return identity, descriptor, None

    def _on_message(self, identity: bytes, descriptor: int, message: Any) -> None:
        taken = next((each for each in self._taken if each.identity == identity and not each.is_lost), None)
        if taken is None:
            if isinstance(message, Offer):
                self._answer(identity, TurnAway("this node has all its machines"))
            return
        taken.heard_s = time.monotonic()
        if message is None or isinstance(message, Offer) or message.epoch != self.epoch:
            return  # an offer that crossed with its answer
        if isinstance(message, Beat):
            for each in taken.ranks:
                each.is_stopped = each.number in message.stopped
            return
        number, rank = message.number, self._by_number.get(message.number)
        if rank is None or rank.machine is not taken.machine:
            self._lose(taken, f"speaks for rank {number}, which it does not have")
        elif isinstance(message, Data):
            try:
                self._lanes.take((number, message.lane), message.data)
            except LanesBroken as error:
                self._lose(taken, str(error))
        elif isinstance(message, Closed):
            self._lanes.finish((number, message.lane))
        elif isinstance(message, Ended):
            rank.note_end(message.how)
            for lane in range(NUM_LANES):
                self._lanes.finish((number, lane))

    def _lose(self, taken: _Taken, why: str) -> None:
        """Its ranks have ended, as far as this node is concerned."""
        if taken.is_lost:
            return
        taken.is_lost = True
        for rank in taken.ranks:
            rank.note_end(why)
            for lane in range(NUM_LANES):
                self._lanes.close((rank.number, lane))

    def _pass_on(self, order: Kill) -> None:
        self._say(self._machine_of(order.number), order)

    def _send_data(self, key: Key, data: bytes) -> None:
        self._say(self._machine_of(key[0]), Data(self.epoch, *key, data))

    def _send_closed(self, key: Key) -> None:
        self._say(self._machine_of(key[0]), Closed(self.epoch, *key))

    def _machine_of(self, number: int) -> _Taken:
        return self._taken[self._by_number[number].machine.number - 1]

    def _say(self, taken: _Taken, message: object) -> None:
        if not taken.is_lost and not self._answer(taken.identity, message):
            self._lose(taken, "takes no more of what is sent to it")

    def _answer(self, identity: bytes, message: object) -> bool:
        """Send without waiting; whether the connection took it."""
        try:
            self._socket.send_multipart([identity, TO_MACHINE.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True
