"""Routers that are frozen while other things fail: when the streams that are open then go on.

    python -m tests.simulation.frozen_router --schedules 3000 --seed 0 --others 3

A router with two prefill and two or three decode nodes, and streams that have begun. The router is frozen for up to
60 s. Up to `--others` faults more begin in the 6 s before its return, or in the second after it. What must hold: within
`AFTER_THAW_S` of the router's return, or of the end of the last of these faults if that is later, each stream goes on
or ends. Everything else that a simulated world checks holds too. A seed makes the same schedule again.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections.abc import Sequence
from functools import partial

from baton.wire.messages.membership import DECODE, PREFILL
from tests.simulation.nodes import NodeProgram
from tests.simulation.world import Client, World

AFTER_THAW_S = 5.0
_FREEZE_AT_S = 0.8
_FREEZES_S = (0.5, 2.0, 4.0, 6.0, 9.5, 12.0, 20.0, 60.0)
_LASTS_S = (0.05, 0.5, 2.0, 4.0, 8.0)
_BEFORE_S, _BEHIND_S = 6.0, 1.0
_LOOK_S = 0.02


class _SlowWorld(World):
    """Steps take long, so that streams last."""

    def _step_s(self) -> float:
        return 0.05 + self.chance.random() * 0.1


class FrozenRouter:
    """The schedule of a seed, with so many faults besides the freeze. `lates_s`: for each stream that was open when the
    router returned, how long after (the router, the last fault) it went on or ended."""

    def __init__(self, seed: int, num_others: int) -> None:
        chance = self._chance = random.Random(seed)
        self.world = _SlowWorld(seed, 2, chance.choice((2, 3)), peers_write=chance.random() < 0.5)
        self.lates_s: list[tuple[float, float]] = []
        self._clients = [self._plan_client(number) for number in range(chance.choice((1, 2, 3)))]
        freeze_s = chance.choice(_FREEZES_S)
        self._thaw_s = self._last_s = _FREEZE_AT_S + freeze_s
        self._num_tokens: dict[int, int] = {}
        clock = self.world.clock
        clock.at(_FREEZE_AT_S, lambda: self.world.pause(self.world.router, freeze_s))
        for _ in range(num_others):
            self._plan_fault(chance.uniform(max(0.7, self._thaw_s - _BEFORE_S), self._thaw_s + _BEHIND_S))
        clock.at(self._thaw_s - 1e-6, self._note_open)
        clock.at(self._thaw_s, self._look)

    def run(self) -> None:
        """Let it happen. Raises `AssertionError` when something does not hold."""
        self.world.run()
        late_s = max((late_s for _, late_s in self.lates_s), default=0.0)
        assert late_s <= AFTER_THAW_S, f"a stream went on {late_s:.2f} s after the last fault"

    def _plan_client(self, number: int) -> Client:
        chance = self._chance
        first, length = chance.randrange(4), chance.choice((2, 9, 14))
        client = Client(number, tuple((first + place) % 29 for place in range(length)), chance.choice((20, 40)))
        self.world.clock.at(0.1 + chance.random() * 0.5, partial(self.world.ask, client))
        return client

    def _plan_fault(self, at_s: float) -> None:
        world, chance = self.world, self._chance
        kind, lasts_s = (
            chance.choice(("kill", "pause", "cut", "cut-peers", "break")),
            chance.choice((0.05, 0.5, 2, 4, 8)),
        )

        def make() -> None:
            if kind == "kill":
                world.kill_node(self._node(), lasts_s)
            elif kind == "pause":
                world.pause(self._node(), lasts_s)
            elif kind == "break":
                world.break_connections(self._node(), world.router)
            else:
                other = world.router if kind == "cut" else self._node(PREFILL)
                world.cut(self._node(DECODE), other, lasts_s)

        world.clock.at(at_s, make)
        self._last_s = max(self._last_s, at_s + (0.0 if kind == "break" else lasts_s))

    def _node(self, role: str = "") -> NodeProgram:
        return self._chance.choice([node for node in self.world.nodes.values() if role in ("", node.role)])

    def _note_open(self) -> None:
        """Which streams are open, and what they have."""
        num_tokens = {client.number: len(client.token_ids[0]) for client in self._clients if not client.is_over}
        self._num_tokens = {number: count for number, count in num_tokens.items() if count}

    def _look(self) -> None:
        now_s = self.world.clock.now_s
        for client in self._clients:
            count = self._num_tokens.get(client.number)
            if count is not None and (client.is_over or len(client.token_ids[0]) > count):
                del self._num_tokens[client.number]
                self.lates_s.append((now_s - self._thaw_s, now_s - self._last_s))
        if self._num_tokens:
            self.world.clock.after(_LOOK_S, self._look)


def main(arguments: Sequence[str]) -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.frozen_router")
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--others", type=int, default=3, help="most faults besides the freeze")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    lates_s: list[list[tuple[float, float]]] = [[] for _ in range(options.others + 1)]
    num_failed = 0
    for seed in range(options.seed, options.seed + options.schedules):
        schedule = FrozenRouter(seed, seed % (options.others + 1))
        try:
            schedule.run()
        except AssertionError as error:
            num_failed += 1
            sys.stdout.write("\n".join([f"seed {seed}:", *schedule.world.timeline, f"does not hold: {error}", ""]))
        lates_s[seed % (options.others + 1)] += schedule.lates_s
    for num_others, found in enumerate(lates_s):
        router_s, fault_s = (max((late[place] for late in found), default=0.0) for place in (0, 1))
        sys.stdout.write(
            f"{num_others} other faults: {len(found)} streams were open; the latest went on {router_s:.2f} s after the "
            f"router, {fault_s:.2f} s after the last fault\n"
        )
    sys.stdout.write(f"{options.schedules} schedules, {num_failed} failed\n")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
