"""The runners of the driver: before it computes a step, it has the other ranks compute the same.

Owns the one order of a step and what has to happen in which place of it where all ranks share one KV memory:

- Blocks are copied, and begun blocks wiped, by this rank alone, before it adds up the embedding. Every rank attends
  after that sum, so none reads a block that is not prepared, and none wipes what another has stored. With stages it
  happens before any of them is told of the step.
- A layer counts as stored when every rank has stored its heads of it. That is certain once the ranks have added up
  what the layer's attention returned, so each layer is told with the next one, and the last one after the step. Those
  of earlier stages are stored when the residual stream is here.

Where each rank has a pool of its own, it prepares blocks itself: it wipes what it begins, and the order of a step says
which blocks it has to copy. What is said above of layers holds there, too.

The other ranks have no queues and sample nothing: what a step says is all that they know. On a GPU, where a step may be
launched while the one before it runs, that one's tokens are told among the devices, behind its sampling. When a step
fails here after it was ordered, the ranks may be anywhere in it: the node has to end. A rank that stands still ends it,
too: a step may take `_PATIENCE` times what is expected of it, within bounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baton.device.base import STEP_TIMEOUT_S, DeviceFailed
from baton.engine.attention.base import LayerStored
from baton.engine.attention.torch_backend import begun_blocks
from baton.engine.models.collectives import Collectives
from baton.engine.runner.base import RunningStep
from baton.engine.runner.forward import DueRows, Forward, ForwardPass, Stream, decoded_pass
from baton.engine.runner.graphs import GraphForward, ReportProgress
from baton.engine.runner.inputs import StepInputs
from baton.engine.runner.model_runner import ModelRunner, PlannedStep, RunnerArguments, due_requests
from baton.engine.runner.readings import StepReadings, logit_rows
from baton.engine.scheduler.reading import RowsRead
from baton.engine.scheduler.request import ScheduledRequest
from baton.engine.scheduler.step import SampledTokens, Step, as_known
from baton.engine.scheduler.step_costs import StepCosts
from baton.engine.settings import EngineSettings
from baton.ranks.executor.messages import Compute, Order, Share
from baton.ranks.executor.passages import Incoming
from baton.wire.errors import BatonError
from baton.wire.request_key import RequestKey

LEAST_S = 10.0
_RECORD_S = 1800.0
_PATIENCE = 10.0
"""A machine that is busy with other things may take so many times as long."""


class Leader(Protocol):
    """The driver's way to tell all other ranks what to do."""

    def tell_ahead(self, order: Order) -> None:
        """Send an order to every rank of the stages before this one. Raises `DeviceFailed`."""
        ...

    def tell(self, order: Order) -> None:
        """Send an order to every other rank of this stage. Raises `DeviceFailed`."""
        ...

    def within(self, limit_s: float) -> AbstractContextManager[None]:
        """A context for calls with the ranks. They take longer than `limit_s` seconds only if a rank stands still: all
        ranks are ended then, so that the calls fail.

        Raises `DeviceFailed` at its end when a rank has ended.
        """
        ...

    def reason_of(self, error: Exception) -> BatonError:
        """The error that ended the ranks, after a call with them has failed."""
        ...


@dataclass(frozen=True, slots=True)
class Led:
    """The other ranks, as the runner of the driver has them: `collectives` is None where a stage is one rank; `costs`:
    of this engine's steps; `begun`: [B, E], what of each block all ranks together store."""

    leader: Leader
    collectives: Collectives | None
    settings: EngineSettings
    costs: StepCosts
    begun: Tensor

    def runner(
        self, arguments: RunnerArguments, run: ForwardPass | None, num_layers_before: int, incoming: Incoming | None
    ) -> LeadingRunner:
        """The runner that leads the other ranks. `incoming`: from the stage before; None: there is one stage."""
        if incoming is None:
            return LeadingRunner(self, arguments, run)
        passed = run or decoded_pass(arguments.decoder, arguments.attention)
        return PipelineRunner(incoming, num_layers_before, passed, self, arguments)


class LeadingRunner(ModelRunner):
    """A runner that tells the other ranks of each step before it computes it. `run`: see `ModelRunner`."""

    def __init__(self, led: Led, arguments: RunnerArguments, run: ForwardPass | None) -> None:
        super().__init__(*arguments, run)
        self._leader = led.leader
        self._collectives = led.collectives
        self._costs = led.costs
        self._begun = led.begun
        self._block_size = led.settings.block_size
        self._has_own_pools = led.settings.divides_pool

    def _launch(self, step: Step, inputs: StepInputs, layer_stored: LayerStored | None) -> RunningStep:
        with self._together():
            self._wipe_begun(step)
            self._leader.tell(self._order(step, inputs, layer_stored))
            launched = self._lead(self._plan(step, inputs), layer_stored)
        return _AwaitedStep(self._together, launched) if self.is_asynchronous else launched

    def record_graphs(self, progress: ReportProgress | None = None) -> int:
        """Record this rank's graphs while the other ranks record theirs. Returns how many there are."""
        with self._leader.within(_RECORD_S):
            return super().record_graphs(progress)

    def _store_sampled(self, requests: Sequence[ScheduledRequest], token_ids: Tensor) -> None:
        """The others have no noise and sample nothing: where a step may be launched before its tokens are here, they
        are told on the device."""
        super()._store_sampled(requests, token_ids)
        if self.is_asynchronous and self._collectives is not None:
            self._collectives.from_first(self._sampled)

    def _lead(self, planned: PlannedStep, layer_stored: LayerStored | None) -> RunningStep:
        """Compute a step that the other ranks of this stage were told of."""
        stored = None if layer_stored is None else _OneLater(layer_stored)
        launched = self._compute(planned, stored)
        if stored is not None:
            stored.finish()
        return launched

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Whatever fails meanwhile fails for the reason that the ranks have; a rank that stands still makes it fail."""
        expected_s = self._costs.expected_s
        limit_s = STEP_TIMEOUT_S if expected_s is None else min(max(_PATIENCE * expected_s, LEAST_S), STEP_TIMEOUT_S)
        try:
            with self._leader.within(limit_s):
                yield
        except Exception as error:
            raise self._leader.reason_of(error) from error

    def _wipe_begun(self, step: Step) -> None:
        """Zero the blocks that the step begins: a backend leaves that to the runner where ranks share blocks."""
        if self._has_own_pools:
            return
        for block in begun_blocks(step.requests, self._block_size):
            self._begun[block].zero_()

    def _order(self, step: Step, inputs: StepInputs, layer_stored: LayerStored | None) -> Compute:
        """The step in plain values. On the host no token is pending: a request is in one step that samples at a
        time."""
        if inputs.has_pending and not self.is_asynchronous:
            raise DeviceFailed("a token that is still sampled cannot be told to other ranks")
        rows = self._recorded_rows(step, inputs, layer_stored)
        shares = tuple(
            Share(each.start, each.num_tokens, np.asarray(each.block_table, dtype=np.int32).tobytes())
            for each in (step.requests if rows is None else rows)
        )
        due, _ = due_requests(step, inputs)
        copied: list[int] = []
        if self._has_own_pools:
            copied = [block for each in step.requests if each.block_copy is not None for block in each.block_copy]
        return Compute(
            shares,
            inputs.token_ids.tobytes(),
            tuple([rows.tobytes() for rows in logit_rows(step, inputs.last_tokens)]),
            _rows(due),
            _rows(copied),
            inputs.sources.tobytes(),
            rows is not None,
        )


class PipelineRunner(LeadingRunner):
    """A `LeadingRunner` in the last of several stages.

    A launch has the stages before this one compute a step. This one computes it when its result is asked for, and other
    steps may be launched meanwhile. A device goes on with the next step without waiting for the host, so there the next
    one is issued as well. It is not issued sooner: to stage inputs would be to wait until the device has begun the step
    before.

    `incoming`: from the stage before; `num_before`: how many layers the stages before have; `run`: the forward pass of
    this one.
    """

    def __init__(
        self, incoming: Incoming, num_before: int, run: ForwardPass, led: Led, arguments: RunnerArguments
    ) -> None:
        super().__init__(led, arguments, self._run_stage)
        self._incoming = incoming
        self._num_before = num_before
        self._run = run
        self._stream = incoming.place
        self._layer_stored: LayerStored | None = None
        self._entered: deque[_EnteredStep] = deque()

    def _launch(self, step: Step, inputs: StepInputs, layer_stored: LayerStored | None) -> RunningStep:
        with self._together():
            self._wipe_begun(step)
            super()._copy_blocks(step)
            order = self._order(step, inputs, layer_stored)
            self._leader.tell_ahead(order)
        self._entered.append(_EnteredStep(self._reach, order, as_known(step), inputs, layer_stored))
        return self._entered[-1]

    @torch.inference_mode()
    def _reach(self, entered: _EnteredStep) -> None:
        """Issue this step, if that is still to be done, and on a device the next one."""
        with self._together():
            while entered.launched is None:
                self._issue()
            if self.is_asynchronous and self._entered:
                self._issue()

    def _issue(self) -> None:
        """Compute the oldest step that this stage has not, with the other ranks of this stage."""
        entered = self._entered.popleft()
        self._leader.tell(entered.order)
        self._layer_stored = entered.layer_stored
        launched = self._lead(self._plan(entered.step, entered.inputs), entered.layer_stored)
        entered.launched = _AwaitedStep(self._together, launched) if self.is_asynchronous else launched

    def _run_stage(self, token_ids: Tensor, positions: Tensor) -> Stream:
        """Receive the step's residual stream [T, E] from the stage before, and run this stage's layers on it."""
        stream = self._incoming.receive(len(positions))
        if self._layer_stored is not None:
            for _ in range(self._num_before):
                self._layer_stored()
        return self._run(stream, positions)

    def _stage(
        self, step: Step, inputs: StepInputs, layer_stored: LayerStored | None, readings: StepReadings | None
    ) -> Forward:
        staged = super()._stage(step, inputs, layer_stored, readings)
        if isinstance(staged, GraphForward):  # which begins where the stream is received
            return _ReceivedForward(self._incoming, len(inputs.token_ids), staged)
        return staged

    def _copy_blocks(self, step: Step) -> None:
        """Do nothing: it was done before the stages were told of the step."""

    def _store_sampled(self, requests: Sequence[ScheduledRequest], token_ids: Tensor) -> None:
        """Do nothing: a request is in one step at a time, and begins the next with what the host knows."""


@dataclass(frozen=True, slots=True)
class _ReceivedForward:
    """A graph of a later stage, behind the receipt of the residual stream that it begins with."""

    incoming: Incoming
    num_tokens: int
    recorded: GraphForward
    stream: None = None

    def compute(self, due: DueRows) -> Tensor | None:
        """Receive the stream, then replay the graph. Returns the logits [N, V], or None when N is 0."""
        self.incoming.receive(self.num_tokens)
        return self.recorded.compute(due)


@dataclass(slots=True)
class _EnteredStep:
    """A step that this stage has not begun. `reach` launches it here, and sets `launched`."""

    reach: Callable[[_EnteredStep], None]
    order: Compute
    step: Step
    inputs: StepInputs
    layer_stored: LayerStored | None
    launched: RunningStep | None = None

    def result(self) -> Mapping[RequestKey, SampledTokens]:
        """Launch the step here if need be, then wait for its tokens."""
        self.reach(self)
        assert self.launched is not None
        return self.launched.result()

    def rows_read(self) -> Mapping[RequestKey, RowsRead]:
        """What was read of rows; nothing before the step was launched."""
        return {} if self.launched is None else self.launched.rows_read()


class _AwaitedStep:
    """A step that a device computes. Its result is waited for within the time that it may take. See `RunningStep`."""

    def __init__(self, together: Callable[[], AbstractContextManager[None]], launched: RunningStep) -> None:
        self._together, self._launched = together, launched

    def result(self) -> Mapping[RequestKey, SampledTokens]:
        """Wait for the tokens. If a rank has ended, raises the error that it ended with."""
        with self._together():
            return self._launched.result()

    def rows_read(self) -> Mapping[RequestKey, RowsRead]:
        """What was read of rows in this step."""
        return self._launched.rows_read()


class _OneLater:
    """Tells of each layer when the next is stored. See `LayerStored`."""

    def __init__(self, layer_stored: LayerStored) -> None:
        self._layer_stored = layer_stored
        self._is_first = True

    def __call__(self) -> None:
        if not self._is_first:
            self._layer_stored()
        self._is_first = False

    def finish(self) -> None:
        """All ranks have computed the step: tell of the last layer."""
        self._layer_stored()


def _rows(rows: Sequence[int]) -> bytes:
    return np.array(rows, dtype=np.int64).tobytes()
