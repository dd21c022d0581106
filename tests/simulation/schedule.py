"""What happens in a simulated world, chosen under a seed.

Owns the choices: how many routers, nodes and clients, how slow links are, and which faults happen when: at a time, or
just when something is sent. A seed is a schedule; the same seed happens in the same way again.
"""

from __future__ import annotations

import logging
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.transports.base import Move
from tests.kvtransfer.loopback import Fault
from tests.simulation.network import Host
from tests.simulation.nodes import NodeProgram
from tests.simulation.programs import RouterProgram
from tests.simulation.world import Client, World
from wire.messages import BOTH, DECODE, PREFILL
from wire.request_key import RequestKey

_FAULTS_UNTIL_S = 1.2
_PAUSES_S = (0.1, 0.5, 2.0, 2.8, 3.3, 5.0, 11.0)
_CUTS_S = (0.1, 0.25, 0.5, 2.0, 4.0)
_RESTARTS_S = (0.05, 0.5, 2.0, 5.0)


@dataclass(frozen=True, slots=True)
class Failure:
    """What a schedule ended with, and how it came to that."""

    seed: int
    error: str
    timeline: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}:", *self.timeline, self.error])


class Schedule:
    """The schedule of a seed. `is_mixed`: all nodes do any leg, and what each prefers changes all the time."""

    def __init__(self, seed: int, *, is_mixed: bool = False) -> None:
        chance = self.chance = random.Random(seed)
        self.block_faults = chance.choice((0.0, 0.0, 0.0, 0.05, 0.3))
        self.peers_write = chance.random() < 0.5
        num_prefills, num_decodes = chance.choice((1, 1, 2)), chance.choice((1, 1, 2, 2, 3))
        self.world = World(
            seed,
            0 if is_mixed else num_prefills,
            0 if is_mixed else num_decodes,
            peers_write=self.peers_write,
            overlaps=chance.random() < 0.5,
            plan=self._fault,
            num_mixed=num_prefills + num_decodes if is_mixed else 0,
            num_routers=chance.choice((1, 1, 1, 2, 2)),
        )
        self.world.slowest_s = chance.choice((0.001, 0.001, 0.02, 0.2))
        for number in range(chance.choice((1, 1, 2, 2, 3, 5))):
            self._plan_client(number)
        for _ in range(40 if is_mixed else 0):
            self.world.clock.at(chance.random() * _FAULTS_UNTIL_S, self._prefer)
        if num_decodes > 1 and chance.random() < 0.4:
            self.world.clock.at(0.2 + chance.random() * 0.5, self._stop_busy_decode_node)
        for _ in range(chance.choice((0, 1, 1, 2, 2, 3, 4))):
            if chance.random() < 0.5:
                self.world.clock.at(chance.random() * _FAULTS_UNTIL_S, chance.choice(self._faults()))
            else:
                self.world.network.when_sent[int(chance.triangular(5, 400, 5))] = self._at_a_message

    def run(self) -> None:
        """Let it happen. Raises `AssertionError` when something does not hold."""
        self.world.run()

    def _plan_client(self, number: int) -> None:
        chance, world = self.chance, self.world
        first = chance.randrange(4)  # some prompts begin alike
        prompt = tuple((first + place) % 29 for place in range(chance.choice((1, 2, 5, 8, 9, 14))))
        client = Client(
            number,
            prompt,
            max_tokens=chance.choice((1, 2, 4, 12, 24, 30)),
            num_choices=chance.choice((1, 1, 1, 1, 2, 3)),
            pause_s=chance.choice((0.0, 0.0, 0.0, 0.0, 0.02, 0.3)),
            router=chance.randrange(len(world.routers)),
        )
        asks_s = chance.random() * 0.7
        world.clock.at(asks_s, lambda: world.ask(client))
        if chance.random() < 0.15:
            world.clock.at(asks_s + chance.random(), lambda: world.leave(client))

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
            self._stop_node,
            self._stop_busy_decode_node,
            self._stall,
            self._fail_step,
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
            world.pause(which, chance.choice(_PAUSES_S))
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
        self.world.stop_node(self._node(), 12.0)

    def _stop_busy_decode_node(self) -> None:
        """It hands its requests over, if there is another one."""
        busy = [node for node in self.world.nodes.values() if node.role == DECODE and not node.is_idle]
        if busy and self.chance.random() < 0.5:
            self.world.stop_node(self.chance.choice(busy), 12.0)
        elif busy:
            self.world.drain_node(self.chance.choice(busy), self._router(), 12.0)

    def _prefer(self) -> None:
        self.world.prefer(self._node(), self.chance.choice((PREFILL, PREFILL, DECODE, BOTH)))

    def _pause_node(self) -> None:
        self.world.pause(self._node(), self.chance.choice(_PAUSES_S))

    def _pause_router(self) -> None:
        self.world.pause(self._router(), self.chance.choice(_PAUSES_S))

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
        node = self._node()
        self.world.note(f"the next step of {node.name} fails")
        self.world.disturbed(self.world.clock.now_s)
        node.runner.num_failing += 1

    def _fault(self, number: int, key: RequestKey, move: Move) -> Fault:
        """What happens to a block of KV on its way."""
        chance, world = self.chance, self.world
        if chance.random() >= self.block_faults:
            return Fault()
        world.disturbed(world.clock.now_s)
        faults = [Fault(num_copies=0), Fault(flipped_bits=(chance.randrange(8),)), Fault(num_cut_bytes=5)]
        if not self.peers_write:
            faults += [Fault(num_copies=2), Fault(delay=chance.randrange(1, 9))]
        fault = chance.choice(faults)
        world.note(f"block {move.index} of {key.handoff_id.hex()[-6:]}/{key.attempt}: {fault}")
        return fault


def run_seed(seed: int, *, is_mixed: bool = False) -> Failure | None:
    """Run the schedule of a seed; what was wrong with it, or None."""
    logging.disable(logging.CRITICAL)
    schedule = Schedule(seed, is_mixed=is_mixed)
    try:
        schedule.run()
    except Exception as error:  # whatever a program raises is a finding
        lines = traceback.format_exception(error)
        text = str(error) if isinstance(error, AssertionError) else "".join(lines)
        return Failure(seed, text or "".join(lines), tuple(schedule.world.timeline))
    finally:
        logging.disable(logging.NOTSET)
    return None
