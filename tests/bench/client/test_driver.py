from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from baton.bench.client.driver import LoadPlan, run_load
from baton.bench.client.endpoint import RequestOptions
from tests.bench.client.rig import PATIENCE_S, Announcing, all_fine, endpoint, load, questions
from tests.bench.mock_server.schedule import Answer, Fault, FaultKind, Script
from tests.bench.mock_server.server import mock_server

QUICK = Answer(0.001, (0.001,) * 3)


async def test_each_request_is_sent_at_its_arrival() -> None:
    arrivals_s = (0.05, 0.0, 0.12, 0.02)
    async with mock_server(Script((QUICK,))) as server:
        run = await load(server.url, questions(4), arrivals_s)
    assert [outcome.scheduled_s for outcome in run.outcomes] == [run.begin_s + arrival_s for arrival_s in arrivals_s]
    assert all(outcome.sent_s >= outcome.scheduled_s for outcome in run.outcomes)
    assert sorted(run.outcomes, key=lambda outcome: outcome.sent_s) == [run.outcomes[index] for index in (1, 3, 0, 2)]
    assert run.begin_s <= run.outcomes[1].sent_s < run.outcomes[2].closed_s <= run.end_s


async def test_a_slow_answer_delays_nobody_else() -> None:
    slow = Answer(0.8)
    async with mock_server(Script((slow,) + (QUICK,) * 19)) as server:
        run = await load(server.url, questions(20), tuple(0.01 * place for place in range(20)))
    first, *others = run.outcomes
    assert all_fine(run.outcomes)
    assert max(outcome.closed_s for outcome in others) < first.closed_s


async def test_a_limit_holds_requests_back_and_the_delay_is_seen() -> None:
    async with mock_server(Script((Answer(0.05),))) as server:
        run = await load(server.url, questions(4, 1), (0.0, 0.01, 0.02, 0.03), max_concurrency=1)
    assert all_fine(run.outcomes)
    for place, (earlier, later) in enumerate(pairwise(run.outcomes), 1):
        assert later.scheduled_s == run.begin_s + 0.01 * place
        assert later.sent_s >= earlier.closed_s
    assert run.client.num_late >= 3


async def test_a_load_that_is_cancelled_leaves_nothing() -> None:
    schedule = Announcing(Script((Answer(0.0, fault=Fault(FaultKind.STALL, 1)),)), 4)
    before = asyncio.all_tasks()
    async with mock_server(schedule) as server:
        plan = LoadPlan(questions(100), tuple(0.001 * place for place in range(5)) + (PATIENCE_S,) * 95, None, 60.0)
        run = asyncio.create_task(run_load([endpoint(server.url)], plan, RequestOptions(), lambda _: None))
        await asyncio.wait_for(schedule.has_come.wait(), PATIENCE_S)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        names = {task.get_name() for task in asyncio.all_tasks() - before}
        await server.until_idle(PATIENCE_S)
    assert not {name for name in names if name.startswith("request")}
    assert [record.left_s is not None for record in server.records] == [True] * 5
