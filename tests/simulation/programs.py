"""What the programs of a simulation have in common, and the router among them.

Owns one life of each: its threads, and what it needs of the world (`Surroundings`). The router is made of the same
parts as the real one, on a virtual event loop; `nodes` has the nodes. A thread runs when something wakes it or when it
asked for it, unless its program is paused or has ended.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from baton.router.nodes.control import ControlLink, ControlPort
from baton.router.nodes.registry import NodeRegistry
from baton.router.requests.relay import Relay, RelaySettings
from baton.router.routing.policies import LeastLoaded
from baton.router.routing.pulls import PullRecords
from baton.wire import links
from tests.kvtransfer.loopback import LoopbackNetwork
from tests.router.eager_ways import EagerWays
from tests.simulation.clock import VirtualClock, VirtualLoop
from tests.simulation.engine import FINGERPRINT
from tests.simulation.network import Context, Host, Network

MODEL = "org/tiny"
ROUTER_ADDRESSES = ("tcp://127.0.0.1:9000", "tcp://127.0.0.1:9001")
SETTINGS = links.LinkSettings()
NODE_WAIT_S = 4.0
RELAY_SETTINGS = RelaySettings(
    local_prefill_tokens=2,
    max_concurrent_requests=64,
    max_attempts=3,
    request_timeout_s=600.0,
    node_wait_s=NODE_WAIT_S,
)
PULL_BOUND_S = 0.5
"""What computing a prefix would take: nothing, on a virtual clock, so this is how long a pull may."""


class Thread:
    """Calls `turn`, which returns in how many seconds it wants to be called again."""

    def __init__(self, clock: VirtualClock, host: Host, turn: Callable[[], float | None]) -> None:
        self.busy_until_s = 0.0
        self._clock = clock
        self._host = host
        self._turn = turn
        self._due_s = float("inf")

    def wake(self, number: int = 1) -> None:
        """Something is there to do; see `Context` for `number`."""
        if number > 0:
            self.wake_at(self._clock.now_s)

    def wake_at(self, when_s: float) -> None:
        """Have a turn then, or when it is not busy any more."""
        when_s = max(when_s, self.busy_until_s)
        if when_s < self._due_s:
            self._due_s = when_s
            self._clock.at(when_s, self._run)

    def _run(self) -> None:
        if self._host.is_dead or self._host.is_paused or self._clock.now_s < self._due_s:
            return
        if self._clock.now_s < self.busy_until_s:
            self._due_s = float("inf")
            self.wake_at(self.busy_until_s)
            return
        self._due_s = float("inf")
        wait_s = self._turn()
        if wait_s is not None:
            self.wake_at(self._clock.now_s + wait_s)

    def resume(self) -> None:
        """The pause of its program is over."""
        self._due_s = float("inf")
        self.wake()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every program needs of the world. `step_s` says how long the next step of an engine takes; `overlaps`:
    engines schedule asynchronously; `routers`: the addresses of those that nodes serve; `max_attempts`: see
    `RelaySettings`; `drafts`: half of the nodes have drafts."""

    clock: VirtualClock
    network: Network
    blocks: LoopbackNetwork
    chance: random.Random
    step_s: Callable[[], float]
    peers_write: bool
    overlaps: bool
    routers: Sequence[str]
    max_attempts: int
    drafts: bool = False


class Program:
    """One life of a program: `threads` are paused, resumed and killed together."""

    def __init__(self, around: Surroundings, name: str) -> None:
        self.around = around
        self.name = name
        self.host = Host(name)
        self.threads: list[Thread] = []

    @property
    def runs(self) -> bool:
        """Whether it is neither paused nor dead."""
        return not (self.host.is_paused or self.host.is_dead)

    def pause(self) -> None:
        """As SIGSTOP."""
        self.host.is_paused = True

    def resume(self) -> None:
        """As SIGCONT."""
        self.host.is_paused = False
        for thread in self.threads:
            thread.resume()

    def kill(self) -> None:
        """As SIGKILL."""
        self.around.network.lose_host(self.host)


class RouterProgram(Program):
    """A router without HTTP: its clients are tasks of its loop. `number`: which of the addresses is its own."""

    def __init__(self, around: Surroundings, number: int = 0) -> None:
        super().__init__(around, f"R{number + 1}")
        self.number = number
        self.loop = VirtualLoop(around.clock)
        self._thread = Thread(around.clock, self.host, self._turn)
        self.threads = [self._thread]
        self.registry = NodeRegistry({MODEL: FINGERPRINT}, epoch=around.chance.getrandbits(63))
        context = cast(Any, Context(around.network, self.host, self._signal))
        self.control = ControlLink(
            context, ControlPort("127.0.0.1", 9000 + number, SETTINGS), self.registry, around.clock
        )
        settings = replace(RELAY_SETTINGS, max_attempts=around.max_attempts)
        ways = EagerWays(PullRecords(), PULL_BOUND_S)
        self.relay = Relay(self.registry, self.control, LeastLoaded(), LeastLoaded(), settings, ways)
        self.call(lambda: self.control.start(self.relay))

    def call(self, function: Callable[[], Any]) -> Any:
        """Call something on its loop."""
        found = self.loop.run_in(function)
        self._thread.wake()
        return found

    def end_loop(self) -> None:
        """Drop everything that the loop of a killed router still holds."""
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_due()
        self.loop.close()

    def _signal(self, number: int) -> None:
        if number > 0:
            self.loop.signalled.add(number)
            self._thread.wake()
        else:
            self.loop.signalled.discard(-number)

    def _turn(self) -> float | None:
        self.loop.run_due()
        next_s = self.loop.next_s
        return None if next_s is None else next_s - self.around.clock.now_s
