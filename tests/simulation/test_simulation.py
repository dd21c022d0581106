"""That the simulation can be relied on: it repeats what it did, lets go of what it made, and finds what is wrong."""

from __future__ import annotations

import _thread
import gc
import logging
import os
import select
import sys
import time
import weakref
from functools import partial
from types import BuiltinFunctionType, FrameType, SimpleNamespace

import pytest

from baton.kvtransfer.arrived import ArrivedBlocks
from baton.wire import codec
from tests.simulation.schedule import SEEDS_PER_WORLD, Schedule, run_seed, run_seeds
from tests.simulation.world import Client, World


def test_a_seed_happens_in_the_same_way_again() -> None:
    for seed in (3, 57, 1155):
        first, second = Schedule(seed), Schedule(seed)
        first.run()
        second.run()
        assert first.world.timeline == second.world.timeline
        assert first.world.clock.now_s == second.world.clock.now_s
        assert first.world.clock.num_asked == second.world.clock.num_asked


_REAL: set[object] = {
    time.time,
    time.monotonic,
    time.monotonic_ns,
    time.perf_counter,
    time.perf_counter_ns,
    time.time_ns,
}
_REAL |= {time.process_time, time.thread_time, time.sleep, _thread.start_new_thread, os.urandom, select.poll}
_STAMPS = {"baton.runtime.clock", "prometheus_client.metrics", "logging"}
"""Figures for people, by which nothing is decided."""
_SLICES = {"baton.kvtransfer.receiving", "baton.kvtransfer.arrived", "baton.kvtransfer.pusher"}
"""How long they go on for: without end in a simulation."""
_TESTING = "hypothesis."
"""It times the garbage collector, wherever that begins."""


def test_no_simulated_code_asks_the_machine_for_the_time_or_chance_or_a_thread() -> None:
    found = set()

    def look(frame: FrameType, event: str, called: object) -> None:
        if event == "c_call" and isinstance(called, BuiltinFunctionType) and called in _REAL:
            found.add(frame.f_globals["__name__"])

    schedules = [Schedule(seed, is_mixed=is_mixed) for seed, is_mixed in ((1, False), (11, False), (14, True))]
    for schedule in schedules:
        sys.setprofile(look)
        try:
            schedule.run()
        finally:
            sys.setprofile(None)
    assert {name for name in found if not name.startswith(_TESTING)} <= _STAMPS | _SLICES
    assert found > _SLICES, "it would be noticed"


def test_a_schedule_is_not_over_before_what_was_planned() -> None:
    for seed in range(5, 60, 10):
        schedule = Schedule(seed)
        schedule.run()
        assert schedule.world.clients
        assert schedule.seed == seed
        assert all(client.is_over for client in schedule.world.clients)
        assert schedule.world.clock.now_s >= schedule.planned_until_s


def test_nothing_holds_a_world_when_its_schedule_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # what is logged of an error holds it, and so its world
    schedule = Schedule(3)
    schedule.run()
    world = weakref.ref(schedule.world)
    del schedule
    gc.collect()
    assert world() is None


def test_a_schedule_comes_behind_the_earlier_ones_of_its_world_and_repeats_what_they_did() -> None:
    alone, behind = Schedule(1152), Schedule(1155)
    alone.run()
    behind.run()
    assert behind.world.timeline[: len(alone.world.timeline)] == alone.world.timeline
    seeds = [line.split()[-1] for line in behind.world.timeline if " seed " in line]
    assert seeds == [f"{seed}:" for seed in range(1150, 1156)]


def test_a_failure_names_its_seed_and_ends_its_world(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(schedule: Schedule) -> None:
        if schedule.seed in (1, 12):
            raise AssertionError("no luck")

    monkeypatch.setattr(Schedule, "_plan", plan)
    assert [(failure.seed, failure.error) for failure in run_seeds(range(30))] == [(1, "no luck"), (12, "no luck")]


def test_without_faults_every_stream_ends_well() -> None:
    world = World(7, 2, 2, peers_write=False)
    clients = [Client(number, tuple(range(number, number + 9)), 12, 1 + number % 3) for number in range(8)]
    for client in clients:
        world.clock.at(0.1, partial(world.ask, client))
    world.run()
    assert [client.error for client in clients] == [""] * 8
    assert all(all(client.finish_reasons) for client in clients)


def _is_found_in(num_seeds: int) -> bool:
    last_seeds = range(SEEDS_PER_WORLD - 1, num_seeds, SEEDS_PER_WORLD)
    return any(run_seed(seed) is not None for seed in last_seeds)


def test_blocks_that_arrive_damaged_and_are_taken_for_good_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArrivedBlocks, "damaged", lambda blocks, checksums: [])
    assert _is_found_in(200)


def test_messages_that_arrive_damaged_and_are_taken_for_good_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "xxhash", SimpleNamespace(xxh3_64_intdigest=lambda body: 0))
    assert _is_found_in(400)


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
