"""The steps that were launched and not collected yet: at most one for each stage of a pipeline, and one more where the
device need not wait for the host.

Owns their order, the handling of a step that fails, and the blocks that wait for a step. A request can end, or be
aborted, while the device still writes into its blocks. They are released when that step was collected, not earlier: the
next owner may be another node, whose writes are not ordered with those of this device.

Does not know why a step is launched, or who wants its results.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from baton.device.base import DeviceFailed
from baton.engine.attention.base import LayerStored
from baton.engine.cache.block_pool import BlockPool, BlockTable
from baton.engine.runner.base import Runner, RunningStep
from baton.engine.scheduler.reading import RowsRead
from baton.engine.scheduler.request import Request
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.step import RequestOutput, SampledTokens, Step
from baton.engine.scheduler.step_costs import StepCosts
from baton.wire.errors import BatonError
from baton.wire.request_key import RequestKey

_log = logging.getLogger(__name__)

StepWatch: TypeAlias = Callable[[Step], LayerStored | None]
"""Called with a step before it is launched; what it returns is called after each layer whose KV is stored."""


class StepFailed(BatonError):
    """The runner could not compute a step; its cause is the runner's error.

    `keys`: the requests in it that are still live, as they were before it. Nothing is in flight any more: a step that
    was launched after it is void as well, and its requests, others among them, are where they were before both.
    """

    code = "internal_error"

    def __init__(self, keys: list[RequestKey]) -> None:
        super().__init__(f"a step with {len(keys)} requests could not be computed")
        self.keys = keys


@dataclass(frozen=True, slots=True)
class _NotLaunched:
    """Stands for a step whose launch failed, until it is collected."""

    error: Exception

    def result(self) -> Mapping[RequestKey, SampledTokens]:
        """Raises the error with which the launch failed."""
        raise self.error

    def rows_read(self) -> Mapping[RequestKey, RowsRead]:
        """Nothing: the step was never computed."""
        return {}


@dataclass(slots=True)
class _StepInFlight:
    """`tables`: blocks that the step may still write into, and that have no other owner."""

    step: Step
    running: RunningStep
    tables: list[BlockTable] = field(default_factory=list)


class StepsInFlight:
    """Launches steps on `runner` and collects them in the order of their launch. `costs` learns from each."""

    def __init__(self, runner: Runner, scheduler: Scheduler, pool: BlockPool, costs: StepCosts) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._pool = pool
        self._costs = costs
        self._steps: deque[_StepInFlight] = deque()
        self._most = scheduler.limits.num_stages + runner.is_asynchronous

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def can_launch_another(self) -> bool:
        """Whether the next step may be launched before the oldest in flight is collected."""
        return len(self._steps) < self._most and not isinstance(self._steps[-1].running, _NotLaunched)

    def launch(self, step: Step, watch: StepWatch) -> None:
        """Begin to compute a step that was just scheduled. Raises `DeviceFailed` only."""
        self._scheduler.blocks.before(step)
        layer_stored = watch(step)
        self._costs.launched(step)
        try:
            running: RunningStep = self._runner.launch(step, layer_stored)
        except DeviceFailed:
            raise
        except Exception as error:  # the step before it, if any, is collected first
            running = _NotLaunched(error)
        self._scheduler.advance(step)
        self._steps.append(_StepInFlight(step, running))

    def collect(self) -> list[RequestOutput]:
        """Wait for the oldest step, and apply what it sampled and read. Raises `StepFailed` and `DeviceFailed`."""
        oldest = self._steps[0]
        try:
            sampled = oldest.running.result()
        except DeviceFailed:
            raise
        except Exception as error:
            raise self._void() from error
        self._costs.collected()
        self._steps.popleft()
        if oldest.tables:
            self._release_tables(oldest)
        if oldest.step.spans:
            return self._scheduler.apply(oldest.step, sampled, oldest.running.rows_read())
        return self._scheduler.apply(oldest.step, sampled)

    def drop(self, request: Request) -> None:
        """Forget a request that nobody wants; its blocks are released once nothing writes into them."""
        self._scheduler.requests.remove(request.key)
        self.release(request)

    def release(self, request: Request) -> None:
        """Release the blocks of a request that has left, once nothing writes into them."""
        self._scheduler.blocks.end_load(request)
        if request.num_steps_in_flight:
            self._steps[-1].tables.append(request.held_blocks)
        else:
            self._pool.release(request.held_blocks)

    def num_stored_tokens(self, request: Request) -> int:
        """Tokens of a request whose KV the collected steps have stored."""
        starts = [
            share.start
            for in_flight in self._steps
            for share in in_flight.step.requests
            if (share.key, share.arrival) == (request.key, request.arrival)
        ]
        return min(starts, default=request.num_computed_tokens)

    def held_tables(self) -> Iterator[BlockTable]:
        """The blocks that are held only for steps in flight."""
        for in_flight in self._steps:
            yield from in_flight.tables

    def _void(self) -> StepFailed:
        """Forget every step, since the oldest failed. The step after it is waited for, because it must not write into
        blocks that are released from here on."""
        failed, *others = self._steps
        for in_flight in others:
            _wait_out(in_flight.running)
        for in_flight in (*reversed(others), failed):
            self._scheduler.rewind(in_flight.step)
            self._release_tables(in_flight)
        self._steps.clear()
        self._costs.lost()
        return StepFailed(self._scheduler.keys_of(failed.step))

    def _release_tables(self, collected: _StepInFlight) -> None:
        for block_table in collected.tables:
            self._pool.release(block_table)


def _wait_out(running: RunningStep) -> None:
    """Wait for the end of a step whose result is of no use. Raises `DeviceFailed`."""
    try:
        running.result()
    except DeviceFailed:
        raise
    except Exception as error:  # the failure that made it useless is reported
        _log.warning("the step after a failed step has failed too: %s", error)
