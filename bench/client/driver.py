"""Sends a workload: each conversation at its arrival (open loop), or so many at a time (closed loop).

Owns the tasks and the connections of a run, and says whether the client itself was the bottleneck: its processor time,
how late its event loop runs, how late it sends. Open loop means that nobody waits for anybody: a slow answer delays the
next turn of its own conversation and nothing else. `max_concurrency` then holds requests back, and their
`scheduled_s` stays what it was, so that the wait is seen.

Invariants: one outcome per request that was sent; a conversation stays on its endpoint and ends with its first failure;
when `run_load` is left, however, no task of it runs and its connections are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import aiohttp

from bench.client.clock import sleep_until
from bench.client.endpoint import Endpoint, History, RequestOptions, check_requests
from bench.client.outcome import Outcome
from bench.client.stream import send
from bench.stats import percentile
from bench.workload.turns import Conversation
from wire.errors import InvalidSetting

LATE_S = 0.010
_PERIOD_S = 0.020
_KEEPALIVE_S = 4.0
"""Below the 5 s after which common servers close an idle connection: a request must not meet its end."""


@dataclass(frozen=True, slots=True)
class ClientFigures:
    """`cpu_share` 1.0 is one core. `num_late`: requests sent more than 10 ms after they should have been."""

    cpu_s: float
    wall_s: float
    cpu_share: float
    loop_lag_p50_ms: float
    loop_lag_p99_ms: float
    loop_lag_max_ms: float
    num_late: int
    max_in_flight: int


class SelfCheck:
    """Watches this process and this event loop while a load runs. Async context manager, used once."""

    def __init__(self) -> None:
        self._lags_s = array("d")
        self._num_in_flight = 0
        self._max_in_flight = 0
        self._begin_s = self._begin_cpu_s = 0.0

    async def __aenter__(self) -> SelfCheck:
        self._begin_s, self._begin_cpu_s = time.monotonic(), time.process_time()
        self._sampler = asyncio.create_task(self._sample(), name="loop-lag")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sampler.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sampler

    @contextlib.contextmanager
    def in_flight(self) -> Iterator[None]:
        self._num_in_flight += 1
        self._max_in_flight = max(self._max_in_flight, self._num_in_flight)
        try:
            yield
        finally:
            self._num_in_flight -= 1

    def figures(self, outcomes: Sequence[Outcome]) -> ClientFigures:
        """From the beginning until this call."""
        wall_s, cpu_s = time.monotonic() - self._begin_s, time.process_time() - self._begin_cpu_s
        lags_ms = [lag_s * 1e3 for lag_s in self._lags_s] or [0.0]
        return ClientFigures(
            cpu_s=cpu_s,
            wall_s=wall_s,
            cpu_share=cpu_s / wall_s,
            loop_lag_p50_ms=percentile(lags_ms, 50),
            loop_lag_p99_ms=percentile(lags_ms, 99),
            loop_lag_max_ms=max(lags_ms),
            num_late=sum(outcome.sent_s - outcome.scheduled_s > LATE_S for outcome in outcomes),
            max_in_flight=self._max_in_flight,
        )

    async def _sample(self) -> None:
        while True:
            due_s = time.monotonic() + _PERIOD_S
            await sleep_until(due_s)
            self._lags_s.append(time.monotonic() - due_s)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Conversation i begins `arrivals_s[i]` seconds after the load does; None: closed loop of `max_concurrency`.

    `timeout_s` is for a whole answer, `stall_s` for a silence in it (None: as long as the answer may take).
    """

    conversations: tuple[Conversation, ...]
    arrivals_s: tuple[float, ...] | None
    max_concurrency: int | None
    timeout_s: float
    stall_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Outcomes in order of conversation and turn. `num_unsent`: turns behind a failed one, never asked for."""

    outcomes: list[Outcome]
    begin_s: float
    end_s: float
    client: ClientFigures
    num_unsent: int = 0


async def run_load(
    endpoints: Sequence[Endpoint], plan: LoadPlan, options: RequestOptions, on_done: Callable[[Outcome], object]
) -> LoadRun:
    """Send everything and wait for all answers. `on_done` gets each outcome as it ends. Raises `InvalidSetting`."""
    _check(endpoints, plan)
    check_requests(endpoints, plan.conversations, options.prompt_form)
    async with _connections(options) as session, SelfCheck() as check:
        load = _Load(session, endpoints, plan, options, on_done, check)
        begin_s = time.monotonic()
        if plan.arrivals_s is None:
            await load.take_turns(plan.max_concurrency or 1)
        else:
            await load.arrive([begin_s + arrival_s for arrival_s in plan.arrivals_s])
        end_s = time.monotonic()
        outcomes = sorted(load.outcomes, key=lambda outcome: (outcome.index, outcome.turn))
        return LoadRun(outcomes, begin_s, end_s, check.figures(outcomes), load.num_unsent)


def _check(endpoints: Sequence[Endpoint], plan: LoadPlan) -> None:
    if not endpoints:
        raise InvalidSetting("a load needs an endpoint")
    if plan.max_concurrency is not None and plan.max_concurrency < 1:
        raise InvalidSetting(f"a concurrency of {plan.max_concurrency} is not at least 1")
    if plan.arrivals_s is None and plan.max_concurrency is None:
        raise InvalidSetting("a closed loop needs a concurrency")
    if plan.arrivals_s is not None and len(plan.arrivals_s) != len(plan.conversations):
        raise InvalidSetting(f"{len(plan.arrivals_s)} arrivals do not fit {len(plan.conversations)} conversations")
    for name, limit_s in (("timeout", plan.timeout_s), ("stall limit", plan.stall_s)):
        if limit_s is not None and not 0 < limit_s < float("inf"):
            raise InvalidSetting(f"a {name} of {limit_s} s is not a time to wait for")


def _connections(options: RequestOptions) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
        headers={"Accept-Encoding": "identity", **options.headers},
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        auto_decompress=False,
        trust_env=False,
    )


class _Load:
    """One run."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        endpoints: Sequence[Endpoint],
        plan: LoadPlan,
        options: RequestOptions,
        on_done: Callable[[Outcome], object],
        check: SelfCheck,
    ) -> None:
        self._session = session
        self._endpoints = endpoints
        self._plan = plan
        self._options = options
        self._on_done = on_done
        self._check = check
        self._room = asyncio.Semaphore(plan.max_concurrency) if plan.max_concurrency else contextlib.nullcontext()
        self.outcomes: list[Outcome] = []
        self.num_unsent = 0

    async def arrive(self, scheduled_s: Sequence[float]) -> None:
        """Begin conversation i at `scheduled_s[i]`, whatever the others do."""
        async with asyncio.TaskGroup() as tasks:
            for index in sorted(range(len(scheduled_s)), key=scheduled_s.__getitem__):
                await sleep_until(scheduled_s[index])
                tasks.create_task(self._converse(index, scheduled_s[index]), name=f"conversation-{index}")

    async def take_turns(self, num_workers: int) -> None:
        """Keep `num_workers` conversations going."""
        waiting = iter(range(len(self._plan.conversations)))

        async def work() -> None:
            for index in waiting:
                await self._converse(index, time.monotonic())

        async with asyncio.TaskGroup() as tasks:
            for number in range(min(num_workers, len(self._plan.conversations))):
                tasks.create_task(work(), name=f"worker-{number}")

    async def _converse(self, index: int, scheduled_s: float) -> None:
        endpoint = self._endpoints[index % len(self._endpoints)]
        history = History(self._plan.conversations[index], endpoint, self._options)
        turn = 0
        while history.num_left:
            outcome = Outcome(index, turn, endpoint.url, scheduled_s)
            async with self._room:
                body = history.next_body()
                outcome.num_prompt_tokens = history.num_prompt_tokens
                with self._check.in_flight():
                    await send(self._session, endpoint, body, outcome, self._plan.timeout_s, self._plan.stall_s)
            self.outcomes.append(outcome)
            self._on_done(outcome)
            if outcome.failure is not None:
                self.num_unsent += history.num_left
                return
            history.add_answer(outcome)
            scheduled_s = outcome.closed_s
            turn += 1
