"""A network in virtual time, seen by its programs as ZMQ sockets.

Owns the connections between DEALER and ROUTER sockets and the messages on them. What is promised is what ZMQ over TCP
promises, and no more: the messages of one connection come in order, those of different connections in any order. What
is sent at one moment over one connection travels together. A connection that breaks loses what is on its way; either
end notices at its own time, and until then sends into nothing. A message may be damaged or come twice; between programs
with a cluster key it cannot, since CURVE ends such a connection.
Whoever dialled keeps what it sends without a connection, dials again, and has the same identity. A paused program reads
nothing, and finishes no handshake.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from tests.kvtransfer.wire import FakeMonitor, NothingThere
from tests.simulation.clock import VirtualClock

_REDIAL_S, _MAX_REDIAL_S = 0.05, 1.0
_HANDSHAKE_S = 0.002
_MAX_QUEUED = 4096
_CLOSED_S = 0.001
_MAX_RECENT = 16
_ENVELOPE_BYTES, _SMALL = 16, 32


class Host:
    """What the network knows of a program: its name, whether it runs, and whether it has ended."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_paused = False
        self.is_dead = False


class Network:
    """All connections. `delay_s` says how long the next message takes."""

    def __init__(self, clock: VirtualClock, chance: random.Random, delay_s: Callable[[], float]) -> None:
        self.clock = clock
        self.chance = chance
        self.delay_s = delay_s
        self.listeners: dict[str, SimSocket] = {}
        self.connections: list[Connection] = []
        self.when_sent: dict[int, Callable[[Host, Host], None]] = {}
        """What happens when a message of that number, from 1 since it began, was just sent from one host to another."""
        self.damaged: set[int] = set()
        """Numbers of messages of which a bit arrives changed."""
        self._num_sent = 0
        self._blocked_until_s: dict[tuple[str, str], float] = {}
        self._held_until_s: dict[tuple[str, str], float] = {}
        self._num_numbers = 0

    def begin_again(self) -> None:
        """Count messages from 1."""
        self._num_sent = 0
        self.when_sent.clear()
        self.damaged.clear()
        for connection in self.connections:
            connection.begin_again()

    def next_number(self) -> int:
        """A number that was not given before: a port, an identity, a descriptor."""
        self._num_numbers += 1
        return self._num_numbers

    @property
    def is_damaging(self) -> bool:
        """Whether the message that is being sent arrives damaged."""
        return self._num_sent in self.damaged

    def count(self, sender: Host, receiver: Host) -> None:
        """A message was sent."""
        self._num_sent += 1
        happen = self.when_sent.get(self._num_sent)
        if happen is not None:
            self.clock.after(0.0, lambda: happen(sender, receiver))

    def is_blocked(self, one: Host, other: Host) -> bool:
        """Whether the two cannot connect now."""
        return self._blocked_until_s.get(_pair(one, other), 0.0) > self.clock.now_s

    def block(self, one: Host, other: Host, for_s: float) -> None:
        """Nothing passes between the two for so long, and their connections break."""
        self._blocked_until_s[_pair(one, other)] = self.clock.now_s + for_s
        for connection in self.between(one, other):
            connection.break_off(self.chance.random() * 2, self.chance.random() * 2)

    def is_held(self, one: Host, other: Host) -> bool:
        """Whether what the two say to each other comes late now; also that a connection has ended."""
        return self._held_until_s.get(_pair(one, other), 0.0) > self.clock.now_s

    def hold(self, one: Host, other: Host, for_s: float) -> None:
        """What the two say to each other from now on comes so much later, and in order."""
        self._held_until_s[_pair(one, other)] = self.clock.now_s + for_s
        for connection in self.between(one, other):
            connection.hold(for_s)

    def between(self, one: Host, other: Host) -> list[Connection]:
        """The connections of two programs that are open."""
        return [each for each in self.connections if each.joins(one, other)]

    def lose_host(self, host: Host) -> None:
        """A program has ended: the kernel tells its peers at once."""
        host.is_dead = True
        for address in [address for address, socket in self.listeners.items() if socket.host is host]:
            del self.listeners[address]
        for connection in list(self.connections):
            if connection.dealer.host is host:
                connection.close()
            elif connection.listener is not None and connection.listener.host is host:
                connection.listener_ends()


class Context:
    """Opens the sockets of one thread of a program, as `zmq.Context` does. `wake` is called with the number of a socket
    when something has come, and with its negative when the socket was used."""

    def __init__(self, network: Network, host: Host, wake: Callable[[int], None]) -> None:
        self.network = network
        self.host = host
        self._wake = wake

    def socket(self, kind: int) -> SimSocket:
        """A socket of `kind`."""
        return SimSocket(self.network, self.host, self._wake, kind)


class SimSocket:
    """A DEALER or a ROUTER socket."""

    def __init__(self, network: Network, host: Host, wake: Callable[[int], None], kind: int) -> None:
        self.host = host
        self.wake = wake
        self.closed = False
        self.is_immediate = False
        self.identity = b""
        self.inbox: deque[list[bytes]] = deque()
        self.routes: dict[bytes, tuple[Connection, int]] = {}
        """By identity: the connection, and which life of it."""
        self.number = network.next_number()
        self._network = network
        self._kind = kind
        self._dialled: dict[str, Connection] = {}
        self._address = ""
        self._monitor: FakeMonitor | None = None

    def setsockopt(self, option: int, value: object) -> None:
        """Options that a simulation does not depend on have no effect."""
        if option == zmq.IDENTITY:
            assert isinstance(value, bytes)
            self.identity = value
        elif option == zmq.IMMEDIATE:
            self.is_immediate = bool(value)

    def getsockopt_string(self, option: int) -> str:
        return self._address

    def bind(self, address: str) -> None:
        self._address = address.replace("*", str(self.number + 10_000))
        self._network.listeners[self._address] = self

    def connect(self, address: str) -> None:
        self._dialled[address] = Connection(self._network, self, address)

    def disconnect(self, address: str) -> None:
        self._dialled.pop(address).close()

    def get_monitor_socket(self, events: int) -> FakeMonitor:
        self._monitor = FakeMonitor()
        return self._monitor

    def disable_monitor(self) -> None:
        self._monitor = None

    def tell(self, event: int) -> None:
        """Its connection was made, or has broken."""
        if self._monitor is not None and not self.closed:
            self._monitor.say(event)
            self.wake(self.number)

    def fileno(self) -> int:
        return self.number

    def poll(self, timeout: int = 0) -> int:
        self.wake(-self.number)
        return zmq.POLLIN if self.inbox else 0

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self.inbox:
            raise NothingThere
        return self.inbox.popleft()

    def recv(self, flags: int) -> bytes:
        return self.recv_multipart(flags)[-1]

    def send(self, frame: bytes, flags: int) -> None:
        self.send_multipart([frame], flags)

    def send_multipart(self, frames: Sequence[bytes], flags: int) -> None:
        self.wake(-self.number)
        if self._kind == zmq.DEALER:
            (connection,) = self._dialled.values()
            connection.send_up(list(frames))
            return
        route = self.routes.get(frames[0])
        if route is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        route[0].send_down(route[1], list(frames[1:]))

    def arrive(self, frames: list[bytes]) -> None:
        """A message has come."""
        if not self.closed and not self.host.is_dead:
            self.inbox.append(frames)
            self.wake(self.number)

    def close(self, linger: int | None = None) -> None:
        self.closed = True
        for connection in self._dialled.values():
            connection.close()
        if self._network.listeners.get(self._address) is self:
            del self._network.listeners[self._address]
        for connection, _ in list(self.routes.values()):
            connection.break_off(_CLOSED_S, 0.0)


class Connection:
    """What a dealer has to one address: up to one TCP connection at a time, and what waits for the next."""

    def __init__(self, network: Network, dealer: SimSocket, address: str) -> None:
        self.dealer = dealer
        self.listener: SimSocket | None = None
        self._network = network
        self._address = address
        self.life = 0
        """Of the TCP connection that is there or being made; what was sent in an earlier one is lost."""
        self._is_up = False
        self._is_closed = False
        self._waiting: deque[list[bytes]] = deque()
        self._identity = b""
        self._redial_s = _REDIAL_S
        self._up, self._down = _Way(self, network), _Way(self, network)
        network.connections.append(self)
        self._dial_in(0.0)

    def joins(self, one: Host, other: Host) -> bool:
        """Whether it is open between these two."""
        return self.listener is not None and {self.dealer.host, self.listener.host} == {one, other}

    def hold(self, for_s: float) -> None:
        """What is sent from now on, both ways, comes so much later: as over a link that loses packets."""
        for way in (self._up, self._down):
            way.last_s = max(way.last_s, self._network.clock.now_s + for_s)

    def damage_next(self) -> None:
        """A bit of the next message of one way arrives changed: as where nothing but TCP looks at what comes."""
        self._network.chance.choice((self._up, self._down)).is_damaging = True

    def repeat(self) -> None:
        """A message that was sent lately, maybe over an earlier TCP connection, comes once more."""
        if self.listener is None:
            return
        way, identity, target = self._network.chance.choice(
            ((self._up, [self._identity], self.listener), (self._down, [], self.dealer))
        )
        if way.recent:
            way.send(self.life, [*identity, *self._network.chance.choice(way.recent)], target)

    def begin_again(self) -> None:
        """No message is damaged any more."""
        self._up.is_damaging = self._down.is_damaging = False

    def send_up(self, frames: list[bytes]) -> None:
        """Send to the listener. Raises `zmq.Again` without room."""
        if not self._is_up:
            if self.dealer.is_immediate or len(self._waiting) >= _MAX_QUEUED:
                raise zmq.Again
            self._waiting.append(frames)
            return
        if self.listener is not None:
            self._network.count(self.dealer.host, self.listener.host)
            self._up.send(self.life, [self._identity, *self._up.passed(frames)], self.listener)

    def send_down(self, life: int, frames: list[bytes]) -> None:
        """Send to the dealer, over the TCP connection `life`."""
        if self.listener is not None:
            self._network.count(self.listener.host, self.dealer.host)
        self._down.send(life, self._down.passed(frames), self.dealer)

    def break_off(self, dealer_notices_s: float, listener_notices_s: float) -> None:
        """The connection breaks; its ends notice after so many seconds."""
        listener = self.listener
        if listener is None:
            return
        route, identity = (self, self.life), self._identity
        self.life += 1
        self.listener = None
        life, clock = self.life, self._network.clock

        def listener_notices() -> None:
            if listener.routes.get(identity) == route:
                del listener.routes[identity]

        def dealer_notices() -> None:
            if self.life == life and not self._is_closed:
                self._is_up = False
                self.dealer.tell(zmq.EVENT_DISCONNECTED)
                self._dial_in(_REDIAL_S)

        _after(clock, listener_notices_s, listener_notices)
        _after(clock, dealer_notices_s, dealer_notices)

    def listener_ends(self) -> None:
        """The listener's program has ended; what it has sent still arrives."""
        clock = self._network.clock
        clock.at(max(self._down.last_s, clock.now_s), lambda: self.break_off(_CLOSED_S, 0.0))

    def close(self) -> None:
        """The dealer closes it for good. What it has sent still arrives."""
        self._is_closed = True
        if self in self._network.connections:
            self._network.connections.remove(self)
        listener, identity, clock = self.listener, self._identity, self._network.clock
        route = (self, self.life)

        def end() -> None:
            if listener is not None and listener.routes.get(identity) == route:
                del listener.routes[identity]

        if listener is not None:
            clock.at(max(self._up.last_s, clock.now_s) + _CLOSED_S, end)

    def _dial_in(self, delay_s: float) -> None:
        life = self.life

        def dial() -> None:
            if self.life == life and not self._is_closed and not self._is_up:
                self._dial()

        self._network.clock.after(delay_s + _HANDSHAKE_S, dial)

    def _dial(self) -> None:
        listener = self._network.listeners.get(self._address)
        hosts = [self.dealer.host] + ([listener.host] if listener is not None else [])
        can_shake_hands = not any(host.is_paused or host.is_dead for host in hosts)
        if listener is None or not can_shake_hands or self._network.is_blocked(self.dealer.host, listener.host):
            self._dial_in(self._redial_s)
            self._redial_s = min(2 * self._redial_s, _MAX_REDIAL_S)
            return
        self.life += 1
        self._is_up, self.listener, self._redial_s = True, listener, _REDIAL_S
        self._identity = self.dealer.identity or b"\0" + self._network.next_number().to_bytes(4, "big")
        listener.routes[self._identity] = (self, self.life)
        self.dealer.tell(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        while self._waiting:
            self.send_up(self._waiting.popleft())


class _Way:
    """One direction of a connection; `last_s`: when the last that was sent arrives; `recent`: the last messages.
    `is_damaging`: the next one will not arrive as it was sent."""

    def __init__(self, connection: Connection, network: Network) -> None:
        self.last_s = 0.0
        self.is_damaging = False
        self.recent: deque[list[bytes]] = deque(maxlen=_MAX_RECENT)
        self._connection = connection
        self._network = network
        self._sent: tuple[float, int] | None = None
        self._together: list[list[bytes]] = []

    def passed(self, frames: list[bytes]) -> list[bytes]:
        """The frames as they will arrive."""
        if self.is_damaging or self._network.is_damaging:
            self.is_damaging = False
            chance = self._network.chance
            place = chance.randrange(len(frames))
            return [*frames[:place], _damaged(frames[place], chance), *frames[place + 1 :]]
        self.recent.append(frames)
        return frames

    def send(self, life: int, frames: list[bytes], target: SimSocket) -> None:
        """Bring frames to a socket, over the TCP connection `life`."""
        clock = self._network.clock
        sent = (clock.now_s, life)
        if self._sent == sent:
            self._together.append(frames)
            return
        together = self._together = [frames]
        self._sent = sent
        self.last_s = max(self.last_s, clock.now_s + self._network.delay_s())

        def arrive() -> None:
            if self._together is together:
                self._sent = None
            if self._connection.life == life:
                for each in together:
                    target.arrive(each)

        clock.at(self.last_s, arrive)


def _damaged(frame: bytes, chance: random.Random) -> bytes:
    """With one bit changed: any, or one of a small number such as a token's id, behind which the message still looks
    well. Of any bits few are such: most are in the names of fields."""
    damaged = bytearray(frame)
    small = [place for place in range(_ENVELOPE_BYTES, len(damaged)) if damaged[place] < _SMALL]
    if small and chance.random() < 0.7:
        damaged[chance.choice(small)] ^= 1 << chance.randrange(5)
    else:
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    return bytes(damaged)


def _pair(one: Host, other: Host) -> tuple[str, str]:
    return (one.name, other.name) if one.name < other.name else (other.name, one.name)


def _after(clock: VirtualClock, delay_s: float, happen: Callable[[], None]) -> None:
    if delay_s:
        clock.after(delay_s, happen)
    else:
        happen()
