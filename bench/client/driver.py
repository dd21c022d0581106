"""Sends a workload: each prompt at its arrival (open loop), so many at a time (closed loop), or one alone.

Owns the tasks and the connections of a run, and says whether the client itself was the bottleneck: its processor time
and how late it sends. Open loop means that nobody waits for anybody. `max_concurrency` then
holds requests back, and their `scheduled_s` stays what it was, so that the wait is seen.

Invariants: one outcome per prompt; when `run_load` is left, however, no task of it runs and its connections are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import aiohttp

from baton.bench.client.endpoint import Endpoint, RequestOptions, body_of, check_prompts
from baton.bench.client.outcome import Outcome
from baton.bench.client.stream import send
from baton.bench.workload.dataset_settings import Prompt

LATE_S = 0.010
_TIMER_STEP_S = 0.001
_KEEPALIVE_S = 4.0
"""Below the 5 s after which common servers close an idle connection: a request must not meet its end."""


@dataclass(frozen=True, slots=True)
class ClientFigures:
    """`cpu_share` 1.0 is one core. `num_late`: requests sent more than 10 ms after they should have been."""

    cpu_s: float
    cpu_share: float
    num_late: int


async def sleep_until(due_s: float) -> None:
    """Return at `due_s` or up to a timer step after it, never before. Other tasks get a turn even when it is past."""
    await asyncio.sleep(0)
    left_s = due_s - time.monotonic()
    while left_s > 0:
        # loops round a delay to their timers' step, some of them down: there may be a rest that is less than a step
        await asyncio.sleep(max(left_s, _TIMER_STEP_S))
        left_s = due_s - time.monotonic()


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Prompt i is sent `arrivals_s[i]` seconds after the load began; None: closed loop of `max_concurrency`.

    `timeout_s` is for a whole answer.
    """

    prompts: tuple[Prompt, ...]
    arrivals_s: tuple[float, ...] | None
    max_concurrency: int | None
    timeout_s: float


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Outcomes in the order of the prompts."""

    outcomes: list[Outcome]
    begin_s: float
    end_s: float
    client: ClientFigures


async def run_load(
    endpoints: Sequence[Endpoint], plan: LoadPlan, options: RequestOptions, on_done: Callable[[Outcome], object]
) -> LoadRun:
    """Send everything and wait for all answers. `on_done` gets each outcome as it ends. Raises `InvalidSetting`."""
    check_prompts(plan.prompts, options.prompt_form)
    async with _connections(options) as session:
        load = _Load(session, endpoints, plan, options, on_done)
        begin_s, begin_cpu_s = time.monotonic(), time.process_time()
        await load.run(begin_s)
        end_s, cpu_s = time.monotonic(), time.process_time() - begin_cpu_s
        outcomes = sorted(load.outcomes, key=lambda outcome: outcome.index)
        num_late = sum(outcome.sent_s - outcome.scheduled_s > LATE_S for outcome in outcomes)
        return LoadRun(outcomes, begin_s, end_s, ClientFigures(cpu_s, cpu_s / (end_s - begin_s), num_late))


def _connections(options: RequestOptions) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
        headers={"Accept-Encoding": "identity", **options.headers},
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        auto_decompress=False,
        trust_env=False,
    )


@dataclass(frozen=True)
class _Load:
    session: aiohttp.ClientSession
    endpoints: Sequence[Endpoint]
    plan: LoadPlan
    options: RequestOptions
    on_done: Callable[[Outcome], object]
    outcomes: list[Outcome] = field(default_factory=list)

    @cached_property
    def _room(self) -> contextlib.AbstractAsyncContextManager[object]:
        limit = self.plan.max_concurrency
        return asyncio.Semaphore(limit) if limit else contextlib.nullcontext()

    async def run(self, begin_s: float) -> None:
        """Send each prompt when it is due, whatever the others do; in a closed loop when one is answered."""
        num, arrivals_s = len(self.plan.prompts), self.plan.arrivals_s
        free = asyncio.Semaphore(self.plan.max_concurrency or 1)
        async with asyncio.TaskGroup() as tasks:
            for index in range(num) if arrivals_s is None else sorted(range(num), key=arrivals_s.__getitem__):
                if arrivals_s is None:
                    await free.acquire()
                scheduled_s = time.monotonic() if arrivals_s is None else begin_s + arrivals_s[index]
                await sleep_until(scheduled_s)
                task = tasks.create_task(self._ask(index, scheduled_s), name=f"request-{index}")
                task.add_done_callback(lambda _: free.release())

    async def _ask(self, index: int, scheduled_s: float) -> None:
        endpoint, prompt = self.endpoints[index % len(self.endpoints)], self.plan.prompts[index]
        outcome = Outcome(index, scheduled_s, num_prompt_tokens=len(prompt.token_ids))
        async with self._room:
            await send(self.session, endpoint, body_of(prompt, endpoint, self.options), outcome, self.plan.timeout_s)
        self.outcomes.append(outcome)
        self.on_done(outcome)


def client_runner() -> asyncio.Runner:
    """The event loop that every benchmark's client runs on: uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)
