"""The store of responses beside the event loop: a database that stands, fails or is asked too much holds nobody up."""

from __future__ import annotations

import asyncio
import gc
import logging
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from baton.router.http.stored import store as module
from baton.router.http.stored.database import Database
from baton.router.http.stored.records import Turn, Unfit
from baton.router.http.stored.store import ResponseStore
from baton.wire.errors import Overloaded

PATIENCE_S = 10.0


class Disk(Database):
    """A database in memory whose disk can be made to stand, and to fail."""

    def __init__(self) -> None:
        super().__init__(None, 2**20, 100.0)
        self.runs = threading.Event()
        self.runs.set()
        self.is_broken = False

    def add(self, owner: str, conversation: int, turn: Turn) -> None:
        self.runs.wait(PATIENCE_S)
        if self.is_broken:
            raise sqlite3.OperationalError("disk I/O error")
        super().add(owner, conversation, turn)


@asynccontextmanager
async def storing(disk: Disk) -> AsyncIterator[ResponseStore]:
    store = ResponseStore(disk)
    try:
        yield store
    finally:
        disk.runs.set()
        await store.close()


async def get(store: ResponseStore, name: str) -> Turn | None:
    return await store.ask(partial(store.responses.get, "alice", name))


async def put(store: ResponseStore, name: str) -> None:
    await store.put("alice", name, partial(Turn, name, None, (), b"{}"))


def figure(store: ResponseStore, name: str) -> float:
    (metric,) = [each for each in store.collect() if each.name == name]
    return float(metric.samples[0].value)


async def test_it_says_how_much_is_stored() -> None:
    async with storing(Disk()) as store:
        assert {sample.value for metric in store.collect() for sample in metric.samples} == {0}
        await put(store, "a")
        assert figure(store, "baton:stored_responses") == 1
        assert 0 < figure(store, "baton:stored_response_bytes") < 2**20
        assert await store.ask(partial(store.responses.delete, "alice", "a"))
        assert await get(store, "a") is None
        assert figure(store, "baton:stored_responses") == 0
        assert figure(store, "baton:responses_not_stored") == 0


async def test_a_disk_that_fails_is_counted_each_time_and_logged_once_until_it_works(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = Disk()
    async with storing(disk) as store:
        for is_broken in (True, True, False, True):
            disk.is_broken = is_broken
            if is_broken:
                with pytest.raises(Unfit, match="cannot be reached"):
                    await put(store, "a")
            else:
                await put(store, "b")
        assert figure(store, "baton:responses_not_stored") == 3
    assert [record.levelno for record in caplog.records if "disk I/O error" in record.message] == [logging.ERROR] * 2


async def test_an_answer_waits_only_so_long_and_is_not_stored_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk()
    async with storing(disk) as store:
        await put(store, "before")
        monkeypatch.setattr(module, "PUT_S", 0.01)
        disk.runs.clear()
        with pytest.raises(Unfit, match="cannot be reached"):
            await put(store, "late")
        with pytest.raises(Overloaded):  # at once, while the disk stands
            await get(store, "before")
        disk.runs.set()
        async with asyncio.timeout(PATIENCE_S):
            while store._is_stuck:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert await get(store, "before") is not None
        assert await get(store, "late") is None


async def test_only_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED", 3)
    disk = Disk()
    async with storing(disk) as store:
        disk.runs.clear()
        waiting = [asyncio.create_task(put(store, f"{number}")) for number in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Unfit):
            await put(store, "one more")
        disk.runs.set()
        await asyncio.gather(*waiting)
        assert figure(store, "baton:stored_responses") == 3


async def test_what_nobody_waits_for_any_more_counts_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED", 1)
    disk = Disk()
    async with storing(disk) as store:
        disk.runs.clear()
        leaving = asyncio.create_task(put(store, "a"))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        with pytest.raises(Overloaded):
            await get(store, "a")
        disk.runs.set()
        async with asyncio.timeout(PATIENCE_S):
            while store._num_queued:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert await get(store, "a") is not None


async def test_what_fails_when_nobody_waits_any_more_is_no_riddle_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    async with storing(disk) as store:
        disk.runs.clear()
        disk.is_broken = True
        leaving = asyncio.create_task(put(store, "a"))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        disk.runs.set()
        async with asyncio.timeout(PATIENCE_S):
            while store._num_queued:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    del leaving
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_what_is_too_old_is_removed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_EXPIRE_EVERY_S", 0.001)
    database = Database(None, 2**20, 0.0)
    store = ResponseStore(database)
    await put(store, "a")
    assert figure(store, "baton:stored_responses") == 1
    store.start()
    async with asyncio.timeout(PATIENCE_S):
        while figure(store, "baton:stored_responses"):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await store.close()


async def test_closing_lets_what_runs_finish() -> None:
    disk = Disk()
    store = ResponseStore(disk)
    disk.runs.clear()
    running = asyncio.create_task(put(store, "a"))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.02, disk.runs.set)
    await store.close()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        disk.link.execute("SELECT 1")
    await running
