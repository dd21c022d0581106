"""Processes that answer questions: they are kept, replaced and ended, and none holds anybody up."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import baton.router.http.child_pool
from baton.router.http.child_pool import ChildPool
from baton.runtime.child import Child
from baton.wire.errors import ChildFailed, Overloaded
from tests.router.answering_program import NAME

LONG_S = 30.0
MORE_THAN_A_PIPE = ["x" * 300_000]


def pool_of(*arguments: str, module: str = NAME) -> ChildPool:
    return ChildPool(module, *arguments, name="the program of the tests", max_at_once=2, answer_s=LONG_S)


@pytest.fixture
def pool() -> Iterator[ChildPool]:
    found = pool_of()
    yield found
    found.close()


async def pid_of(pool: ChildPool, question: Any = ("say",)) -> int:
    """The process that has answered."""
    return int((await pool.run(pool.ask, question))["pid"])


async def test_a_process_answers_until_it_ends_and_none_is_left(pool: ChildPool) -> None:
    first = await pid_of(pool)
    assert await pid_of(pool, MORE_THAN_A_PIPE) == first
    # it died while nobody asked: nobody hears of it
    os.kill(first, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, first, os.WEXITED | os.WNOWAIT)
    second = await pid_of(pool)
    assert second != first
    # it says that it ends, and is not asked again
    assert await pid_of(pool, ["end"]) == second
    assert not psutil.pid_exists(second)
    third = await pid_of(pool)
    with pytest.raises(ChildFailed, match="exited with status 1"):
        await pool.run(pool.ask, ["die"])
    assert not psutil.pid_exists(third)
    together = await asyncio.gather(pid_of(pool), pid_of(pool), pid_of(pool))
    assert len(set(together)) <= 2
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in together)


def until_there(path: Path) -> None:
    until_s = time.monotonic() + LONG_S
    while not path.exists():
        assert time.monotonic() < until_s, f"{path.name} is not there"
        time.sleep(0.01)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes waits for the process of that id short, and for no other: on a busy machine those take what they take."""

    def begin(pid: int) -> None:
        write, read_line = Child.write, Child.read_line

        def written(child: Child, content: bytes, timeout_s: float) -> None:
            write(child, content, min(timeout_s, 0.05) if child.pid == pid else timeout_s)

        def line(child: Child, timeout_s: float) -> bytes:
            return read_line(child, min(timeout_s, 0.05) if child.pid == pid else timeout_s)

        monkeypatch.setattr(Child, "write", written)
        monkeypatch.setattr(Child, "read_line", line)

    return begin


async def test_a_process_that_does_not_answer_is_ended_with_the_question(
    pool: ChildPool, impatient: Callable[[int], None]
) -> None:
    stopped = await pid_of(pool)
    os.kill(stopped, signal.SIGSTOP)
    impatient(stopped)
    with pytest.raises(ChildFailed, match="said nothing within"):
        await pid_of(pool)
    assert not psutil.pid_exists(stopped)


async def test_a_process_that_does_not_read_is_ended_and_another_one_asked(
    pool: ChildPool, impatient: Callable[[int], None]
) -> None:
    stopped = await pid_of(pool)
    os.kill(stopped, signal.SIGSTOP)
    impatient(stopped)
    async with asyncio.timeout(LONG_S):
        assert await pid_of(pool, MORE_THAN_A_PIPE) != stopped
    assert not psutil.pid_exists(stopped)


async def test_questions_under_way_fail_at_once_when_the_pool_is_closed(pool: ChildPool, tmp_path: Path) -> None:
    others_of_tests = {each.pid for each in psutil.Process().children()}
    was_read = tmp_path / "read"
    asked = pool.run(pool.ask, ["be silent", str(was_read)])
    await asyncio.to_thread(until_there, was_read)
    waiting = [pool.run(pool.ask, ["say"]) for _ in range(3)]
    pool.close()
    with pytest.raises(ChildFailed, match="was killed by SIGKILL"):
        await asked
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(end, ChildFailed | Overloaded | asyncio.CancelledError) for end in ends), ends
    assert {each.pid for each in psutil.Process().children()} <= others_of_tests


async def test_an_error_that_a_process_begins_with_is_the_answer() -> None:
    pool = pool_of("there is no tokenizer")
    answer = await pool.run(pool.ask, ["say"])
    pool.close()
    assert answer["error"] == "there is no tokenizer"
    assert not psutil.pid_exists(answer["pid"])


async def test_a_process_that_cannot_be_started_is_too_much_load(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = pool_of(module="tests.router.no_such_program")
    with pytest.raises(Overloaded, match="cannot start the program of the tests"):
        await pid_of(broken)
    monkeypatch.setattr(baton.router.http.child_pool, "Child", _no_process)
    with pytest.raises(Overloaded, match="cannot start the program of the tests"):
        await pid_of(broken)
    broken.close()


def _no_process(*_: object, **__: object) -> None:
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
