"""The simulated router and nodes: seeds that the suite runs, and that the simulation itself can be relied on.

`python -m tests.simulation` runs as many as one likes.
"""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest

from tests.simulation.schedule import Schedule, run_seed
from tests.simulation.world import Client, World

_NUM_SEEDS, _NUM_PARTS = 480, 6


@pytest.mark.parametrize("part", range(_NUM_PARTS))
def test_every_stream_is_right_and_nothing_is_left(part: int) -> None:
    failures = [failure for seed in range(part, _NUM_SEEDS, _NUM_PARTS) if (failure := run_seed(seed)) is not None]
    assert not failures, str(failures[0])


@pytest.mark.parametrize("part", range(2))
def test_nodes_that_do_any_leg_and_change_what_they_prefer_break_no_stream(part: int) -> None:
    seeds = [263, *range(part, 60, 2)]  # 263: a request that was confined no longer began twice
    failures = [failure for seed in seeds if (failure := run_seed(seed, is_mixed=True)) is not None]
    assert not failures, str(failures[0])


def test_a_seed_happens_in_the_same_way_again() -> None:
    for seed in (3, 57, 1151):
        first, second = Schedule(seed), Schedule(seed)
        first.run()
        second.run()
        assert first.world.timeline == second.world.timeline
        assert first.world.clock.now_s == second.world.clock.now_s
        assert first.world.clock.num_asked == second.world.clock.num_asked


def test_nothing_holds_a_world_when_its_schedule_is_over() -> None:
    schedule = Schedule(3)
    schedule.run()
    world = weakref.ref(schedule.world)
    del schedule
    gc.collect()
    assert world() is None


def test_without_faults_every_stream_ends_well() -> None:
    world = World(7, 2, 2, peers_write=False)
    clients = [Client(number, tuple(range(number, number + 9)), 12, 1 + number % 3) for number in range(8)]
    for client in clients:
        world.clock.at(0.1, partial(world.ask, client))
    world.run()
    assert [client.error for client in clients] == [""] * 8
    assert all(all(client.finish_reasons) for client in clients)


def test_a_wrong_token_is_found() -> None:
    world = World(7, 1, 1, peers_write=True)
    client = Client(0, (1, 2, 3, 4, 5), 4)
    world.clock.at(0.1, lambda: world.ask(client))
    world.run()
    client.token_ids[0][2] += 1
    with pytest.raises(AssertionError, match="is not of"):
        world.check()


def test_a_stream_that_hangs_is_found() -> None:
    world = World(7, 1, 1, peers_write=True)
    world.clock.at(0.1, lambda: world.ask(Client(0, (1, 2, 3, 4, 5), 4)))
    world.clock.at(0.05, world.router.pause)  # for ever, and nobody says so
    with pytest.raises(AssertionError, match="hang"):
        world.run()
