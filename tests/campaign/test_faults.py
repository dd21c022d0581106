"""Faults of a campaign that overlap: each is undone when the last of them is over, and excuses what comes of it."""

from __future__ import annotations

import asyncio
import resource
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.campaign import faults
from tests.campaign.faults import Injector
from tests.campaign.schedule import ROUTER_TARGET, Fault


@pytest.fixture
def router() -> Iterator[Any]:
    """A program that does nothing."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield SimpleNamespace(process=process, is_running=True, ready={"event": "ready"})
        process.kill()


def _soft_limit(router: Any, kind: int = resource.RLIMIT_AS) -> int:
    return resource.prlimit(router.process.pid, kind)[0]


def test_of_two_faults_that_take_memory_from_a_router_the_later_still_excuses_its_end_and_nothing_is_taken_afterwards(
    router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_EXCUSED_S", 0.0)
    deployment = SimpleNamespace(router=router, router_excuses=[])
    excused: list[int] = []

    def note(line: str) -> None:
        if line.endswith("is over"):
            excused.append(len(deployment.router_excuses))

    injector = Injector(cast(Any, deployment), note, pytest.fail)
    before = _soft_limit(router)
    lasting_s = (0.01, 0.02)
    planned = [Fault(n, 0.0, "router-memory", ROUTER_TARGET, s, "", 0.0, 0.0) for n, s in enumerate(lasting_s)]
    asyncio.run(injector.run(planned))
    assert excused == [1, 0]
    assert _soft_limit(router) == before


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_router_that_starts_has_room_to_say_so(router: Any, *, is_ready: bool) -> None:
    before, limits = _soft_limit(router, resource.RLIMIT_FSIZE), []

    async def run() -> None:
        fault = Fault(0, 0.0, "router-disk-full", ROUTER_TARGET, 0.2, "", 0.0, 0.0)
        injector = Injector(cast(Any, SimpleNamespace(router=router)), lambda line: None, pytest.fail)
        making = asyncio.ensure_future(injector.run([fault]))
        await asyncio.sleep(0.05)
        limits.append(_soft_limit(router, resource.RLIMIT_FSIZE))
        await making

    router.ready = router.ready if is_ready else {}
    asyncio.run(run())
    assert limits == [0 if is_ready else before]
    assert _soft_limit(router, resource.RLIMIT_FSIZE) == before
