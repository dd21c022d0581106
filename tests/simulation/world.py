"""Routers, nodes and clients on a virtual clock and network, what can happen to them, and what must hold afterwards.

Owns the programs and their lives, the clients, and the timeline. Nothing in here is chosen: `schedule` says what
happens and when, or a test does.

What must hold: each output index of a stream comes once, in order, with the token that the model generates; every
stream ends within a bound once the faults are over, well unless the faults justify an error; and then nothing is left:
no request at a router, no leg, handoff, lease or block at a node, no timer of a request.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import baton.kvtransfer.incoming
import baton.kvtransfer.outgoing
import baton.kvtransfer.pusher
import baton.kvtransfer.receiving
from baton.kvtransfer.messages import ProcessIdentity
from baton.router.requests import inbox as inboxes
from baton.router.requests import moves
from baton.router.requests.attempt import RelayRequest
from baton.router.requests.flight import Flight
from baton.router.requests.inbox import Inbox
from baton.router.requests.relay import Relay
from baton.router.routing.suspicion import MAX_SUSPICIOUS
from baton.wire.errors import BatonError
from baton.wire.messages.membership import BOTH, DECODE, PREFILL
from baton.wire.messages.output import FINISH_LENGTH
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.kvtransfer.loopback import FaultPlan, LoopbackNetwork, without_faults
from tests.simulation.clock import VirtualClock
from tests.simulation.engine import POISON, reference
from tests.simulation.network import Host, Network
from tests.simulation.nodes import NodeProgram
from tests.simulation.programs import MODEL, NODE_WAIT_S, ROUTER_ADDRESSES, Program, RouterProgram, Surroundings

END_BOUND_S = 25.0
"""After the last fault, every stream ends within this: a silent router is noticed after 10 s, a lease is 5 s, a node is
waited for 4 s, and attempts wait for each other."""
QUIET_BOUND_S = 25.0
_LOOK_S = 0.2
_INBOX_BOUND = 12
_AHEAD_TOKENS = 12
_NEVER_S = 1e9
_CALM_S = 0.4
"""So long after the last fault something may still come of it: a broken connection is judged 0.3 s after it is seen."""
_LEAVE_S = 12.0
"""A node that was told to leave has ended by then."""


@dataclass(slots=True)
class Client:
    """One request, of `num_choices` choices, and what it has had. `pause_s`: how long it takes to read a delivery.
    `router`: the number of the router that it asks. `resumes`: when that dies, it asks the next life of it for the rest
    of its stream. `thawed_s`: when its router last went on after a pause; `longest_thaw_s`: the longest gap
    since then. `asked`: the life of the router that has its request."""

    number: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    num_choices: int = 1
    pause_s: float = 0.0
    router: int = 0
    resumes: bool = False
    token_ids: list[list[int]] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    begun_s: float = 0.0
    longest_gap_s: float = 0.0
    thawed_s: float | None = None
    longest_thaw_s: float = 0.0
    error: str = ""
    is_over: bool = False
    has_left: bool = False
    task: asyncio.Task[None] | None = None
    asked: RouterProgram | None = None

    def __post_init__(self) -> None:
        self.token_ids = [[] for _ in range(self.num_choices)]
        self.finish_reasons = [""] * self.num_choices

    async def run(self, router: RouterProgram) -> None:
        """Ask and read, as the HTTP handler of a request does."""
        relay, inbox = router.relay, Inbox()
        read_s = self.begun_s = router.loop.time()
        try:
            await relay.node_wait.for_any_node(MODEL)
            params = [
                DecodingParams(temperature=0.0, max_tokens=self.max_tokens, ignore_eos=True, choice=choice)
                for choice in range(self.num_choices)
            ]
            flights = self._start(relay, params, inbox)
            try:
                while not all(self.finish_reasons):
                    for index in [index for index in flights if self.finish_reasons[index]]:
                        relay.close(flights.pop(index))  # as `Answer` does with the choices that have ended
                    taken = await inbox.take()
                    self._went_on(read_s, router.loop.time())
                    read_s = router.loop.time()
                    for index, delivery in taken:
                        self.token_ids[index].extend(delivery.token_ids)
                        self.finish_reasons[index] = delivery.finish_reason or self.finish_reasons[index]
                    if self.pause_s:
                        await asyncio.sleep(self.pause_s)
            finally:
                for flight in flights.values():
                    relay.close(flight)
        except BatonError as error:
            self._went_on(read_s, router.loop.time())
            self.error = error.code

    def _start(self, relay: Relay, params: Sequence[DecodingParams], inbox: Inbox) -> dict[int, Flight]:
        """Begin all choices together; or, of a stream that is resumed, what has not ended of each, as `Answer` does."""
        requests = [
            RelayRequest(MODEL, Prompt(self.prompt_ids), each, emitted_ids=tuple(token_ids))
            for each, token_ids in zip(params, self.token_ids, strict=True)
        ]
        if not any(self.token_ids):
            return dict(enumerate(relay.start_choices(requests, inbox, 0)))
        unfinished = [index for index, reason in enumerate(self.finish_reasons) if not reason]
        return {index: relay.start(requests[index], inbox, index) for index in unfinished}

    def _went_on(self, before_s: float, now_s: float) -> None:
        self.longest_gap_s = max(self.longest_gap_s, now_s - before_s)
        if self.thawed_s is not None:
            self.longest_thaw_s = max(self.longest_thaw_s, now_s - max(before_s, self.thawed_s))

    def ended(self, task: asyncio.Task[None]) -> None:
        """Its task is over, also when it never began."""
        self.is_over = True

    def check(self) -> None:
        """What it has must be a prefix of what the model generates, and all of it if it finished."""
        for choice, token_ids in enumerate(self.token_ids):
            expected = list(reference(self.prompt_ids, self.max_tokens, choice))
            assert token_ids == expected[: len(token_ids)], f"client {self.number}: {token_ids} is not of {expected}"
            if self.finish_reasons[choice]:
                assert token_ids == expected, f"client {self.number} finished after {len(token_ids)} tokens"
                assert self.finish_reasons[choice] == FINISH_LENGTH


class World:
    """See the module. `note` adds a line to the timeline."""

    def __init__(
        self,
        seed: int,
        num_prefills: int,
        num_decodes: int,
        *,
        peers_write: bool,
        overlaps: bool = False,
        plan: FaultPlan = without_faults,
        num_mixed: int = 0,
        num_routers: int = 1,
        max_attempts: int = 3,
        drafts: bool = False,
    ) -> None:
        self.chance = random.Random(seed)
        self.clock = VirtualClock()
        self.timeline: list[str] = []
        self.slowest_s = 0.001
        self.network = Network(self.clock, self.chance, self._delay_s)
        self.blocks = LoopbackNetwork(plan)
        addresses = ROUTER_ADDRESSES[:num_routers]
        self.around = Surroundings(
            self.clock,
            self.network,
            self.blocks,
            self.chance,
            self._step_s,
            peers_write,
            overlaps,
            addresses,
            max_attempts,
            drafts,
        )
        self.dead: set[ProcessIdentity] = set()
        self.clients: list[Client] = []
        self.dead_routers: list[RouterProgram] = []
        self.quiet_from_s = self.bound_from_s = 0.0
        self.num_causes = self.num_crashes = 0
        self.without_decode_s = [0.0] * num_routers
        self.is_over = False
        self.routers = [RouterProgram(self.around, number) for number in range(num_routers)]
        self.nodes: dict[str, NodeProgram] = {}
        self._restarts_due = 0
        for role, number in ((PREFILL, num_prefills), (DECODE, num_decodes)):
            for place in range(number):
                self.start_node(role, f"{role[0].upper()}{place + 1}")
        for place in range(num_mixed):
            self.start_node(DECODE, f"M{place + 1}", BOTH)

    @property
    def router(self) -> RouterProgram:
        """The first router."""
        return self.routers[0]

    def note(self, text: str) -> None:
        """Add a line to the timeline."""
        self.timeline.append(f"{self.clock.now_s:9.3f} {text}")

    def is_gone(self, process: ProcessIdentity) -> bool:
        """As `baton.kvtransfer.process_identity.is_gone`."""
        return process in self.dead

    def disturbed(self, until_s: float, *, is_cause: bool = True, more_s: float = 0.0) -> None:
        """A fault lasts until then, and may last for `more_s` more; `is_cause`: it may cost a request an attempt."""
        self.quiet_from_s = max(self.quiet_from_s, until_s)
        self.bound_from_s = max(self.bound_from_s, until_s + more_s)
        self.num_causes += is_cause

    def program_of(self, host: Host) -> Program | None:
        """The program that is alive on this host."""
        return next((each for each in (*self.routers, *self.nodes.values()) if each.host is host and each.runs), None)

    # clients

    def ask(self, client: Client) -> None:
        """A request comes. When its router is down, its client is refused and asks again."""
        self.disturbed(self.clock.now_s, is_cause=False)
        router = self.routers[client.router]
        client.is_over = client.has_left
        if client.is_over:
            return
        if router.host.is_dead:
            self.clock.after(0.3, lambda: self.ask(client))
            return
        if client not in self.clients:
            self.clients.append(client)
        what = f"{len(client.prompt_ids)} + {client.max_tokens} x {client.num_choices}"
        self.note(f"client {client.number} asks {router.name}: {what}")
        client.asked = router
        client.task = router.call(lambda: router.loop.create_task(client.run(router)))
        client.task.add_done_callback(client.ended)

    def leave(self, client: Client) -> None:
        """A client goes away."""
        if client.task is not None and not client.is_over:
            self.note(f"client {client.number} leaves")
            client.has_left = True
            if not self.routers[client.router].host.is_dead:
                self.routers[client.router].call(client.task.cancel)

    # faults

    def pause(self, program: Program, for_s: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        if not program.runs:
            return
        self.note(f"{program.name} is paused for {for_s:g} s")
        program.pause()
        self.disturbed(self.clock.now_s + for_s)

        def resume() -> None:
            if not program.host.is_dead:
                self.note(f"{program.name} goes on")
                program.resume()
                for client in self._streams_of(program):
                    client.thawed_s = self.clock.now_s

        self.clock.after(for_s, resume)

    def kill_node(self, node: NodeProgram, restart_s: float) -> None:
        """SIGKILL, and another life later."""
        if not node.host.is_dead:
            self.note(f"{node.name} is killed")
            node.kill()
            self.dead.add(node.process)
            self._restart(node, restart_s)

    def stop_node(self, node: NodeProgram) -> None:
        """SIGTERM, and another life after its end."""
        if node.runs:
            self.note(f"{node.name} is told to leave")
            node.leave()
            self.disturbed(self.clock.now_s, more_s=_LEAVE_S)

    def drain_node(self, node: NodeProgram, router: RouterProgram) -> None:
        """An operator asks a router to take a node out of service; another life comes after its end."""
        member = router.registry.get(node.epoch)
        if member is not None and router.runs:
            self.note(f"{router.name} is asked to drain {node.name}")
            router.call(lambda: router.relay.drain(member, starts_again=True))
            self.disturbed(self.clock.now_s + 1.0, more_s=_LEAVE_S)

    def kill_router(self, router: RouterProgram, restart_s: float) -> None:
        """SIGKILL: every client of it loses its stream."""
        if router.host.is_dead:
            return
        self.note(f"{router.name} is killed")
        router.kill()
        self.dead_routers.append(router)
        for client in self._streams_of(router):
            client.asked = None
            if client.resumes:
                self.ask(client)
            else:
                client.has_left = client.is_over = True
        self.disturbed(self.clock.now_s + restart_s)
        self._restarts_due += 1
        self.clock.after(restart_s, partial(self._restart_router, router.number))

    def _streams_of(self, program: Program) -> list[Client]:
        """The clients that wait for something of this life of a router; none of a node."""
        return [client for client in self.clients if client.asked is program and not client.is_over]

    def fail_steps(self, node: NodeProgram, number: int) -> None:
        """So many steps of a node cannot be computed."""
        self.note(f"the next {number} steps of {node.name} fail")
        self.disturbed(self.clock.now_s)
        self.num_causes += number - 1
        node.runner.num_failing += number

    def lose_transport(self, node: NodeProgram, for_s: float) -> None:
        """What carries the blocks of a node ends, and starts again."""
        if not node.host.is_dead:
            self.note(f"the transport of {node.name} ends, and starts again after {for_s:g} s")
            self.disturbed(self.clock.now_s + for_s)
            node.lose_transport(for_s)

    def cut(self, one: Program, other: Program, for_s: float) -> None:
        """Nothing passes between the two for so long."""
        self.note(f"{one.name} and {other.name} are cut off from each other for {for_s:g} s")
        self.network.block(one.host, other.host, for_s)
        self.disturbed(self.clock.now_s + for_s + 2.0)

    def break_connections(self, one: Program, other: Program) -> None:
        """Their connections break, and can be made again at once."""
        self.note(f"connections of {one.name} and {other.name} break")
        for connection in self.network.between(one.host, other.host):
            if self.chance.random() < 0.7:
                connection.break_off(self.chance.random() * 0.05, self.chance.random() * 0.05)
        self.disturbed(self.clock.now_s)

    def hold(self, one: Program, other: Program, for_s: float) -> None:
        """What they say to each other from now on comes so much later, and in order."""
        self.note(f"what {one.name} and {other.name} say to each other comes {for_s:g} s later")
        self.network.hold(one.host, other.host, for_s)
        self.disturbed(self.clock.now_s + for_s)

    def damage(self, one: Program, other: Program) -> None:
        """A message between the two arrives damaged."""
        self.note(f"a message between {one.name} and {other.name} will be damaged")
        for connection in self.network.between(one.host, other.host):
            connection.damage_next()
        self.disturbed(self.clock.now_s + _LOOK_S)

    def damage_message(self, number: int) -> None:
        """The message of that number arrives damaged, counted since it began; where something else happens just then,
        nothing."""

        def note(sender: Host, receiver: Host) -> None:
            self.note(f"what {sender.name} has sent to {receiver.name} is damaged")
            self.disturbed(self.clock.now_s + _LOOK_S)

        if self.network.when_sent.setdefault(number, note) is note:
            self.network.damaged.add(number)

    def repeat(self, one: Program, other: Program) -> None:
        """A message between the two comes once more."""
        self.note(f"a message between {one.name} and {other.name} comes again")
        for connection in self.network.between(one.host, other.host):
            connection.repeat()
        self.disturbed(self.clock.now_s)

    def cut_for_a_moment(self, name: str) -> None:
        """A node's connection to the first router breaks, both ends notice at once, and it is made again."""
        self.note(f"the connection of {name} breaks")
        for connection in self.network.between(self.nodes[name].host, self.router.host):
            connection.break_off(0.001, 0.001)

    def prefer(self, node: NodeProgram, preference: str) -> None:
        """All routers give a mixed node other legs from now on."""
        self.note(f"{node.name} prefers {preference}")
        for router in self.routers:
            router.registry.prefer(node.epoch, preference)

    def start_node(self, role: str, name: str, prefers: str = "") -> None:
        """A new life of a node."""
        node = self.nodes[name] = NodeProgram(self.around, role, name, prefers)
        self.note(f"{name} starts, epoch {node.epoch % 10**6}")

    def _restart(self, node: NodeProgram, after_s: float) -> None:
        self.disturbed(self.clock.now_s + after_s)
        self._restarts_due += 1

        def start() -> None:
            self._restarts_due -= 1
            self.start_node(node.role, node.name, node.prefers)

        self.clock.after(after_s, start)

    def _restart_router(self, number: int) -> None:
        self._restarts_due -= 1
        self.routers[number] = RouterProgram(self.around, number)
        self.note(f"{self.routers[number].name} starts again")

    def _delay_s(self) -> float:
        return self.chance.random() * self.slowest_s

    def _step_s(self) -> float:
        return 0.002 + self.chance.random() * 0.03

    # the run

    def run(self) -> None:
        """Let everything happen until nothing is left, and check what must hold. Raises `AssertionError`."""
        with self.running():
            self.play()

    @contextmanager
    def running(self) -> Iterator[None]:
        """While this lasts, `play` may be called; it ends the programs."""
        with self._patched():
            try:
                yield
            finally:  # a loop that nobody closes, and a task that never began, warn when they are collected
                self._end()

    def play(self) -> None:
        """As `run`, and leave the programs as they are: something else may be planned then."""
        self.is_over = False
        self.clock.after(_LOOK_S, self._look)
        while not self.is_over and self.clock.step():
            pass
        self.check()

    def begin_again(self, seed: str) -> None:
        """Forget what has happened, but for what the programs know of it: something else is planned from now on."""
        self.chance.seed(seed)
        self.clients.clear()
        self.num_causes = self.num_crashes = 0
        self.without_decode_s = [0.0] * len(self.routers)
        self.quiet_from_s = self.bound_from_s = self.clock.now_s
        self.network.begin_again()
        for node in self.nodes.values():
            node.runner.num_failing = 0

    def _look(self) -> None:
        """Look after nodes that have ended, and whether everything is over."""
        now_s = self.clock.now_s
        for node in self.nodes.values():
            if node.host.is_dead and node.process not in self.dead:
                self.note(f"{node.name} has {'crashed' if node.has_crashed else 'ended'} {node.refusal}")
                self.dead.add(node.process)
                self.num_crashes += node.has_crashed
                self.num_causes += node.has_crashed
                self._restart(node, 0.5)
        unended = [client.number for client in self.clients if not client.is_over]
        for router in self.routers if unended else ():
            if not any(self._is_available(node, router) for node in self.nodes.values()):
                self.without_decode_s[router.number] += _LOOK_S
        is_calm = now_s > self.quiet_from_s + _CALM_S and not self._restarts_due
        self.is_over = is_calm and self._is_quiet()
        waited_s = now_s - self.bound_from_s
        assert not unended or waited_s < END_BOUND_S, f"clients {unended} hang"
        assert self.is_over or waited_s < END_BOUND_S + QUIET_BOUND_S, f"not quiet: {self._leftovers()}"
        if not self.is_over:
            self.clock.after(_LOOK_S, self._look)

    def _is_available(self, node: NodeProgram, router: RouterProgram) -> bool:
        if node.role != DECODE or not node.runs or node.is_stalled or node.stopper.is_asked or not router.runs:
            return False
        # who waits behind the one that nodes die of may wait for a node that is not cut off any more and has to join;
        # and a node of which a heartbeat or Hello was damaged joins a heartbeat later
        is_away = (self.num_crashes > 0 or self.network.damaged) and router.registry.get(node.epoch) is None
        hosts = node.host, router.host
        return not (is_away or self.network.is_blocked(*hosts) or self.network.is_held(*hosts))

    def _is_quiet(self) -> bool:
        if not all(client.is_over for client in self.clients) or any(each.relay.num_in_flight for each in self.routers):
            return False
        return all(node.is_idle and not node.stopper.is_asked for node in self.nodes.values() if not node.host.is_dead)

    def _leftovers(self) -> list[str]:
        return [
            f"{node.name}: {node.leg.num_live} live, {sum(len(side.handoffs) for side in node.sides)} handoffs, "
            f"{node.core.status()}"
            for node in self.nodes.values()
            if not node.is_idle
        ]

    def check(self) -> None:
        """What must hold at the end."""
        for client in self.clients:
            client.check()
            assert client.has_left or client.error or all(client.finish_reasons)
            assert not client.error or self._justifies(client), f"client {client.number}: {client.error}"
        num_poisons = sum(client.prompt_ids[: len(POISON)] == POISON for client in self.clients)
        # a node that could not be told that it was lost may still die of what it was given before
        bound = MAX_SUSPICIOUS * num_poisons + (self.num_causes > self.num_crashes)
        assert self.num_crashes <= bound, f"{self.num_crashes} nodes died of {num_poisons}"
        for node in self.nodes.values():
            node.core.check()
        for router in self.routers:
            self._check_router(router)
        ended = [*self.dead_routers, *self.routers]
        assert [error for router in ended for error in router.loop.errors] == []

    @staticmethod
    def _check_router(router: RouterProgram) -> None:
        relay, registry = router.relay, router.registry
        counts = relay.counters
        assert counts.num_requests == counts.num_finished + counts.num_failed + counts.num_cancelled, counts
        counted = {
            node.node_id: (node.num_legs, node.num_awaiting, len(node.prompts), len(node.live_keys))
            for node in registry.all()
        }
        assert not any(any(counts) for counts in counted.values()), counted
        assert relay.node_wait.num_waiting == relay.node_wait.num_paused == 0
        assert router.loop.num_timers <= 2, "a timer of a request is left"  # Ping, and a look at suspects

    def _justifies(self, client: Client) -> bool:
        if client.error == "no_node":
            return self.without_decode_s[client.router] > NODE_WAIT_S - 2.5
        return client.error == "request_failed" and self.num_causes >= 3

    def _end(self) -> None:
        for each in (*self.dead_routers, *self.routers):
            each.end_loop()

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """Random numbers of the programs come from the schedule, and what would take real time takes none."""
        replaced: list[tuple[Any, str, object]] = [
            (baton.kvtransfer.incoming, "is_gone", self.is_gone),
            (baton.kvtransfer.receiving, "_SLICE_S", _NEVER_S),
            (baton.kvtransfer.pusher, "_SLICE_S", _NEVER_S),
            (baton.kvtransfer.outgoing, "_MIN_JOB_BYTES", 1),
            (inboxes, "MAX_DUE", _INBOX_BOUND),
            (moves, "AHEAD_TOKENS", _AHEAD_TOKENS),
            (secrets, "token_bytes", self.chance.randbytes),
            (secrets, "randbelow", self.chance.randrange),
        ]
        before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
        for module, name, value in replaced:
            setattr(module, name, value)
        try:
            yield
        finally:
            for module, name, value in before:
                setattr(module, name, value)
