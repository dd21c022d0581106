"""What happens in a simulated world, chosen under a seed.

Owns the choices: how many routers, nodes and clients, how slow links are, and which faults happen when: at a time, or
just when something is sent. A seed is a schedule. Ten of them follow each other in one world: each begins with what the
programs have kept of those before it, and ends when nothing of it is left. The same seed happens in the same way again.
"""

from __future__ import annotations

import gc
import logging
import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from baton.kvtransfer.transports.base import Move
from baton.wire.messages.membership import BOTH, DECODE, PREFILL
from baton.wire.request_key import RequestKey
from tests.kvtransfer.loopback import Fault
from tests.kvtransfer.pools import BLOCK_BYTES
from tests.simulation.engine import POISON, reference
from tests.simulation.network import Host
from tests.simulation.nodes import NodeProgram
from tests.simulation.programs import Program, RouterProgram
from tests.simulation.world import Client, World

_NODE_PAUSES_S = (0.1, 0.1, 0.1, 0.1, 0.5, 0.5, 0.5, 0.5, 2.8, 3.3, 6.0)
"""Heartbeats are missed for 3 s, and leases are of 5 s."""
_ROUTER_PAUSES_S = (0.1, 0.1, 0.5, 0.5, 0.5, 0.5, 3.3, 5.0, 11.0)
"""Nodes believe in a silent router for 10 s."""
_CUTS_S = (0.1, 0.1, 0.25, 0.25, 0.25, 0.5, 0.5, 2.0, 4.0)
_HELD_S = (0.3, 1.5, 3.5, 6.0)
_RESTARTS_S = (0.05, 0.05, 0.05, 0.05, 0.5, 0.5, 0.5, 2.0, 5.0)
_STARTS_S = (0.1, 0.1, 0.5, 2.0, 2.0, 7.0)
"""Whoever connects waits for a transport for one lease."""

_NUM_TURNS, _LONGEST_TURN = 6, 24
SEEDS_PER_WORLD = 10
"""So many schedules follow each other in one world: making programs and letting them meet costs as much as one."""


@dataclass(frozen=True, slots=True)
class Size:
    """Of how many of each there may be; chosen with equal chances."""

    prefills: tuple[int, ...]
    decodes: tuple[int, ...]
    routers: tuple[int, ...]
    clients: tuple[int, ...]
    choices: tuple[int, ...]
    tokens: tuple[int, ...]
    faults: tuple[int, ...]
    asked_until_s: float
    faults_until_s: float


TINY = Size((1,), (1, 1, 1, 2), (1,), (1, 1, 1, 2), (1, 1, 1, 1, 2), (1, 2, 4, 6), (1, 1, 1, 2), 0.1, 0.25)
SMALL = Size((1,), (1, 1, 2), (1, 1, 1, 2), (1, 1, 2), (1, 1, 1, 2), (1, 2, 4, 6, 10), (1, 1, 2, 3), 0.1, 0.25)
LARGE = Size(
    (1, 1, 2), (1, 2, 2, 3), (1, 1, 2), (1, 2, 3, 5), (1, 1, 2, 3), (1, 2, 4, 12, 24, 30), (0, 1, 2, 3, 4), 0.4, 0.8
)
_SIZES = (LARGE, *(SMALL,) * 6, *(TINY,) * 57)
"""Of worlds, in turn. Most of what can go wrong needs few programs and few tokens, and costs a fraction of the time."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What a schedule ended with, and how it came to that."""

    seed: int
    error: str
    timeline: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}:", *self.timeline, self.error])


class Schedule:
    """The schedule of a seed, behind those of the seeds before it in the same world. `is_mixed`: all nodes do any leg,
    and what each prefers changes all the time. `next_turns`: prompts that go on behind answers of the last clients."""

    def __init__(self, seed: int, *, is_mixed: bool = False) -> None:
        self.last_seed = seed
        self.seed = seed - seed % SEEDS_PER_WORLD
        self.planned_until_s = self.block_faults = 0.0
        self.next_turns: tuple[tuple[int, ...], ...] = ()
        self._is_mixed = is_mixed
        chance = self.chance = random.Random(f"world of {self.seed}")
        size = self.size = _SIZES[self.seed // SEEDS_PER_WORLD % len(_SIZES)]
        self.has_poison = chance.random() < 0.1
        self.peers_write = chance.random() < 0.5
        num_prefills, self.num_decodes = chance.choice(size.prefills), chance.choice(size.decodes)
        self.world = World(
            self.seed,
            0 if is_mixed else num_prefills,
            0 if is_mixed else self.num_decodes,
            peers_write=self.peers_write,
            overlaps=chance.random() < 0.5,
            plan=self._fault,
            num_mixed=num_prefills + self.num_decodes if is_mixed else 0,
            num_routers=chance.choice(size.routers),
            max_attempts=8 if self.has_poison else 3,
            drafts=random.Random(f"drafts of {self.seed}").random() < 0.7,
        )

    def run(self) -> None:
        """Let it happen. Raises `AssertionError` when something does not hold; `seed` is the one it is of."""
        with self.world.running():
            for seed in range(self.seed, self.last_seed + 1):
                self.seed = seed
                self._plan()
                self.world.play()

    def _plan(self) -> None:
        chance, size, world = self.chance, self.size, self.world
        chance.seed(f"schedule {self.seed}")
        world.begin_again(f"chance of {self.seed}")
        world.note(f"seed {self.seed}:")
        self.block_faults = chance.choice((0.0, 0.0, 0.0, 0.05, 0.3))
        world.slowest_s = chance.choice((0.001, 0.001, 0.02, 0.2))
        for number in range(chance.choice(size.clients)):
            self._plan_client(number)
        if self.has_poison and chance.random() < 0.5:
            self._plan_poison()
        for _ in range(40 if self._is_mixed else 0):
            self._at(chance.random() * size.faults_until_s, self._prefer)
        if self.num_decodes > 1 and chance.random() < 0.4:
            self._at(0.05 + chance.random() * 0.3, self._stop_busy_decode_node)
        for _ in range(chance.choice(size.faults)):
            if chance.random() < 0.5:
                self._at(chance.random() * size.faults_until_s, chance.choice(self._faults()))
            else:
                world.network.when_sent[int(chance.triangular(1, 200, 1))] = self._at_a_message
        if chance.random() < 0.25:
            for number in chance.sample(range(1, 60), 3):
                world.damage_message(number)

    def _at(self, in_s: float, happen: Callable[[], None]) -> None:
        """Plan something; the schedule is not over before."""
        when_s = self.world.clock.now_s + in_s
        self.planned_until_s = max(self.planned_until_s, when_s)
        self.world.disturbed(when_s, is_cause=False)
        self.world.clock.at(when_s, happen)

    def _plan_client(self, number: int) -> None:
        chance, world, size = self.chance, self.world, self.size
        first = chance.randrange(4)  # some prompts begin alike
        prompt = tuple((first + place) % 29 for place in range(chance.choice((1, 2, 5, 8, 9, 14))))
        asks_s = chance.random() * size.asked_until_s
        if self.next_turns and chance.random() < 0.5:
            prompt = chance.choice(self.next_turns)
        client = Client(
            number,
            prompt,
            max_tokens=chance.choice(size.tokens),
            num_choices=chance.choice(size.choices),
            pause_s=chance.choice((0.0, 0.0, 0.0, 0.0, 0.02, 0.2)),
            router=chance.randrange(len(world.routers)),
            resumes=chance.random() < 0.5,
        )
        self._at(asks_s, lambda: world.ask(client))
        if client.num_choices == 1 and len(prompt) + client.max_tokens < _LONGEST_TURN:
            turn = (*prompt, *reference(prompt, client.max_tokens), *prompt[:2])
            self.next_turns = (*self.next_turns, turn)[-_NUM_TURNS:]
        if chance.random() < 0.15:
            self._at(asks_s + chance.random() * 0.4, lambda: world.leave(client))

    def _plan_poison(self) -> None:
        world = self.world
        client = Client(99, (*POISON, 1, 2), max_tokens=4, router=self.chance.randrange(len(world.routers)))
        self._at(self.chance.random() * self.size.asked_until_s, lambda: world.ask(client))

    def _faults(self) -> tuple[Callable[[], None], ...]:
        return (
            self._kill_node,
            self._kill_node,
            self._pause_node,
            self._pause_node,
            self._pause_router,
            self._kill_router,
            self._break,
            self._break,
            self._cut,
            self._hold,
            self._damage,
            self._repeat,
            self._stop_node,
            self._lose_a_router_that_drains,
            self._stop_busy_decode_node,
            self._stall,
            self._fail_step,
            self._fail_steps,
            self._lose_transport,
        )

    def _at_a_message(self, sender: Host, receiver: Host) -> None:
        """A fault in the moment in which one of them has sent something to the other."""
        world, chance = self.world, self.chance
        one, other = world.program_of(sender), world.program_of(receiver)
        if one is None or other is None:
            return
        which = chance.choice((one, other))
        what = chance.choice(("kill", "kill", "pause", "break", "break", "cut"))
        world.note(f"when {one.name} sends something to {other.name}:")
        if what == "kill" and isinstance(which, NodeProgram):
            world.kill_node(which, chance.choice(_RESTARTS_S))
        elif what == "kill" and isinstance(which, RouterProgram):
            world.kill_router(which, chance.choice(_RESTARTS_S))
        elif what == "pause":
            self._pause(which)
        elif what == "break":
            world.break_connections(one, other)
        else:
            world.cut(one, other, chance.choice(_CUTS_S))

    def _node(self) -> NodeProgram:
        return self.chance.choice(list(self.world.nodes.values()))

    def _router(self) -> RouterProgram:
        return self.chance.choice(self.world.routers)

    def _kill_node(self) -> None:
        self.world.kill_node(self._node(), self.chance.choice(_RESTARTS_S))

    def _stop_node(self) -> None:
        self.world.stop_node(self._node())

    def _stop_busy_decode_node(self) -> None:
        """It hands its requests over, if there is another one."""
        busy = [node for node in self.world.nodes.values() if node.role == DECODE and not node.is_idle]
        if busy and self.chance.random() < 0.5:
            self.world.stop_node(self.chance.choice(busy))
        elif busy:
            self.world.drain_node(self.chance.choice(busy), self._router())

    def _prefer(self) -> None:
        self.world.prefer(self._node(), self.chance.choice((PREFILL, PREFILL, DECODE, BOTH)))

    def _pause(self, program: Program) -> None:
        pauses_s = _ROUTER_PAUSES_S if isinstance(program, RouterProgram) else _NODE_PAUSES_S
        self.world.pause(program, self.chance.choice(pauses_s))

    def _pause_node(self) -> None:
        self._pause(self._node())

    def _pause_router(self) -> None:
        self._pause(self._router())

    def _kill_router(self) -> None:
        self.world.kill_router(self._router(), self.chance.choice(_RESTARTS_S))

    def _break(self) -> None:
        world, node = self.world, self._node()
        peers = self._peers(node)
        world.break_connections(node, self.chance.choice([self._router(), self._router(), *peers]))

    def _cut(self) -> None:
        world, node = self.world, self._node()
        peers = self._peers(node)
        world.cut(node, self.chance.choice([self._router(), *peers]), self.chance.choice(_CUTS_S))

    def _hold(self) -> None:
        self.world.hold(*self._neighbours(), self.chance.choice(_HELD_S))

    def _damage(self) -> None:
        self.world.damage(*self._neighbours())

    def _repeat(self) -> None:
        self.world.repeat(*self._neighbours())

    def _neighbours(self) -> tuple[Program, Program]:
        """A node, and a program that it talks to."""
        node = self._node()
        return node, self.chance.choice([self._router(), *self._peers(node)])

    def _lose_a_router_that_drains(self) -> None:
        world, router, restart_s = self.world, self._router(), self.chance.choice(_RESTARTS_S)
        world.drain_node(self._node(), router)
        world.clock.after(self.chance.random() * 0.1, lambda: world.kill_router(router, restart_s))

    def _peers(self, node: NodeProgram) -> list[NodeProgram]:
        """Those with which it has handoffs."""
        others = [peer for peer in self.world.nodes.values() if peer is not node]
        return [peer for peer in others if node.prefers or peer.role != node.role]

    def _stall(self) -> None:
        node, for_s = self._node(), self.chance.choice((0.5, 3.0, 5.0))
        if node.runs:
            self.world.note(f"a step of {node.name} takes {for_s:g} s")
            self.world.disturbed(self.world.clock.now_s + for_s)
            node.stall(for_s)

    def _fail_step(self) -> None:
        self.world.fail_steps(self._node(), 1)

    def _fail_steps(self) -> None:
        """Until the routers give it no more requests."""
        self.world.fail_steps(self._node(), 100)

    def _lose_transport(self) -> None:
        self.world.lose_transport(self._node(), self.chance.choice(_STARTS_S))

    def _fault(self, number: int, key: RequestKey, move: Move) -> Fault:
        """What happens to a block of KV on its way."""
        chance, world = self.chance, self.world
        if chance.random() >= self.block_faults:
            return Fault()
        world.disturbed(world.clock.now_s)
        flipped, cut = chance.randrange(8 * BLOCK_BYTES), chance.randrange(1, BLOCK_BYTES + 1)
        faults = [Fault(num_copies=0), Fault(flipped_bits=(flipped,)), Fault(num_cut_bytes=cut)]
        if not self.peers_write:
            faults += [Fault(num_copies=2), Fault(delay=chance.randrange(1, 9))]
        fault = chance.choice(faults)
        world.note(f"block {move.index} of {key.handoff_id.hex()[-6:]}/{key.attempt}: {fault}")
        return fault


def run_seeds(seeds: Sequence[int], *, is_mixed: bool = False) -> list[Failure]:
    """What was wrong with the schedules of these seeds, which follow each other. Behind one that fails the rest of its
    world is left out. A world that is over is garbage in cycles: it is collected while it is young, and the garbage
    collector looks at nothing else."""
    was_enabled = gc.isenabled()
    gc.disable()
    logging.disable(logging.CRITICAL)
    failures = []
    try:
        for _, of_world in groupby(seeds, lambda seed: seed // SEEDS_PER_WORLD):
            failure = run_seed(max(of_world), is_mixed=is_mixed)
            if failure is not None:
                failures.append(failure)
            gc.collect(0)
    finally:
        logging.disable(logging.NOTSET)
        if was_enabled:
            gc.enable()
    return failures


def run_seed(seed: int, *, is_mixed: bool = False) -> Failure | None:
    """Run the schedule of a seed, behind those before it in its world; what was wrong with one of them, or None."""
    schedule = Schedule(seed, is_mixed=is_mixed)
    try:
        schedule.run()
    except Exception as error:  # whatever a program raises is a finding
        lines = traceback.format_exception(error)
        text = str(error) if isinstance(error, AssertionError) else "".join(lines)
        return Failure(schedule.seed, text or "".join(lines), tuple(schedule.world.timeline))
    return None
