"""That the simulation can be relied on: it repeats what it did, lets go of what it made, and finds what is wrong."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest

from tests.simulation.schedule import Schedule
from tests.simulation.world import Client, World


def test_a_seed_happens_in_the_same_way_again() -> None:
    for seed in (3, 57, 1151):
        first, second = Schedule(seed), Schedule(seed)
        first.run()
        second.run()
        assert first.world.timeline == second.world.timeline
        assert first.world.clock.now_s == second.world.clock.now_s
        assert first.world.clock.num_asked == second.world.clock.num_asked


def test_a_schedule_is_not_over_before_what_was_planned() -> None:
    for seed in range(20):
        schedule = Schedule(seed)
        schedule.run()
        assert schedule.world.clients
        assert all(client.is_over for client in schedule.world.clients)
        assert schedule.world.clock.now_s >= schedule.planned_until_s


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
