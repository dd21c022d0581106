"""The runner: computes one step with the real model.

Owns the decoder, the attention backend and the sampler of one device, the staging memory, and the tokens that the last
step sampled. Knows no queues, leases or nodes: it is given a `Step` and returns tokens.

A step goes to the device in one upload, masks of grammars in another while it is computed, and comes back in one fetch;
between them nothing asks the device for a value, so a launch returns while the device computes. All of a step is read
in its launch. A token that the step before samples does not pass through the host: `sampled` holds one for each row of
the last step, and the next step's inputs name the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch

from baton.device.base import Device, HostCopy
from baton.engine.attention.base import AttentionBackend, KeepsStates, LayerStored, PlannedShare
from baton.engine.models.base import RunnableDecoder
from baton.engine.runner.base import RunningStep
from baton.engine.runner.drafted_rows import DraftedRows
from baton.engine.runner.follower import ComputedStep, StepFollower
from baton.engine.runner.forward import DueRows, EagerSteps, Forward, ForwardPass, decoded_pass
from baton.engine.runner.graphs import DecodeGraphs, ReportProgress, one_token_each
from baton.engine.runner.greedy_series import GreedySeries
from baton.engine.runner.inputs import InputReader, StepInputs, read_inputs
from baton.engine.runner.limits import RunnerLimits, staging_bytes
from baton.engine.runner.plain_rows import tokens_by_key
from baton.engine.runner.readings import StepReadings
from baton.engine.runner.redraws import redraw_beforehand
from baton.engine.runner.sampler import Sampler
from baton.engine.runner.sampling_plan import SamplingPlan
from baton.engine.scheduler.reading import RowsRead
from baton.engine.scheduler.request import ScheduledRequest
from baton.engine.scheduler.step import SampledToken, SampledTokens, Step
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams

_NO_ENDS = np.empty(0, dtype=np.int64)


class SampledRows(Protocol):
    """The tokens of a step's rows, on their way to the host."""

    def tokens(self) -> list[SampledToken | None]:
        """Wait for them; None for a row without a number. Raises as `HostCopy.wait`."""
        ...


@dataclass(frozen=True, slots=True)
class FetchedRows:
    """Sampled rows that are on their way from the device. `outputs`: what sampling by `plan` has returned."""

    plan: SamplingPlan
    outputs: HostCopy

    def tokens(self) -> list[SampledToken | None]:
        """Wait for the rows; a token for each of them."""
        arrays = self.outputs.wait()
        return self.plan.tokens(arrays) if arrays else []


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device computes. `keys` are the requests of the sampled rows, one row after another. `read`: what
    the step reads of prompts, and a copy of that."""

    keys: Sequence[RequestKey]
    rows: SampledRows
    read: tuple[StepReadings, HostCopy] | None = None

    def result(self) -> Mapping[RequestKey, SampledTokens]:
        """Wait for the step; its tokens, by request."""
        return tokens_by_key(self.keys, self.rows.tokens())

    def rows_read(self) -> Mapping[RequestKey, RowsRead]:
        """What was read of its rows, by request. Only after `result`."""
        if self.read is None:
            return {}
        readings, outputs = self.read
        return readings.read(outputs.wait())


class PlannedStep(NamedTuple):
    """A step that was read: `due`, `rows` and `plan` say what it samples, and how. `drafted`: its drafts, where states
    go back behind wrong ones."""

    step: Step
    inputs: StepInputs
    due: Sequence[ScheduledRequest]
    rows: DueRows
    plan: SamplingPlan
    readings: StepReadings | None
    drafted: DraftedRows | None


class RunnerArguments(NamedTuple):
    """What every runner has; `blocks`: the tensor that `attention` reads and writes, [B, ...]."""

    decoder: RunnableDecoder
    attention: AttentionBackend
    blocks: torch.Tensor
    sampler: Sampler
    device: Device
    limits: RunnerLimits


class ModelRunner:
    """Runs a decoder over paged KV. See `Runner`. For its first arguments see `RunnerArguments`."""

    def __init__(
        self,
        decoder: RunnableDecoder,
        attention: AttentionBackend,
        blocks: torch.Tensor,
        sampler: Sampler,
        device: Device,
        limits: RunnerLimits,
        run: ForwardPass | None = None,
        readers: Sequence[InputReader] = (),
        greedy: GreedySeries | None = None,
    ) -> None:
        """`run`: computes what `decoder` does for the step that `attention` has planned; None: the decoder itself.
        `readers`: of what some requests have beside tokens. `greedy`: computes by `run` the steps of a series that it
        can."""
        self._readers = readers
        self.is_asynchronous = device.is_asynchronous
        self._decoder = decoder
        self._attention = attention
        self._blocks = blocks
        self._sampler = sampler
        self._device = device
        self._limits = limits
        self._staging = device.staging(staging_bytes(limits))
        self._sampled = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device.torch_device)
        self._eager = EagerSteps(
            decoder, run or decoded_pass(decoder, attention), attention, self._staging, self._sampled
        )
        self._greedy = greedy
        self._graphs: DecodeGraphs | None = None
        self._stream: torch.Tensor | None = None  # that graphs begin with in a later stage
        self._sampled_rows: dict[RequestKey, int] = {}
        self._follower: StepFollower | None = None
        # entered in every step: as a decorator it would be made anew each time, which takes 30 us
        self._inference = torch.inference_mode()

    def be_followed(self, follower: StepFollower) -> None:
        """Tell `follower` of each step but those of a series. Before the first launch, and instead of graphs."""
        self._follower = follower

    @torch.inference_mode()
    def record_graphs(self, progress: ReportProgress | None = None) -> int:
        """Record decode steps, where device and attention can; the number of graphs. Before the first launch.

        Without this every step runs operation by operation. `progress(done, total)` counts graphs.
        """
        if not self._device.records:
            return 0
        if self._limits.spare_block is None:
            raise ValueError("graphs need a spare block for their padding")
        graphs = DecodeGraphs(
            self._decoder,
            self._device,
            self._staging,
            lambda: self._begin((), (), 0),
            self._sampled,
            self._limits.max_num_seqs,
            self._limits.spare_block,
            self._stream,
        )
        with self._device.issuing():
            num_graphs = graphs.record(self._attention, progress)
        self._graphs = graphs if num_graphs else None
        return num_graphs

    def warm_up(self) -> None:
        """Compute one small step of each kind in the spare block, so that no request waits for kernels to be built,
        chosen or loaded. Without a spare block there is nothing to wait for.
        """
        spare = self._limits.spare_block
        if spare is None:
            return
        sampled, greedy = DecodingParams(top_p=0.9, seed=0), DecodingParams(temperature=0.0)
        table = (spare, spare)
        shares = (
            ScheduledRequest(RequestKey.numbered(1), 0, 1, (0,), Prompt((0,)), table, sampled, True),
            ScheduledRequest(RequestKey.numbered(2), 0, 2, (0, 0), Prompt((0, 0)), table, greedy, True),
        )
        num_shares = min(len(shares), self._limits.max_num_seqs, self._limits.max_step_tokens - 1)
        for step in (Step(shares[:num_shares]), Step(shares[:1])):
            if step.requests:
                self.launch(step).result()
        self._sampled_rows = {}

    def launch(self, step: Step, layer_stored: LayerStored | None = None) -> RunningStep:
        """Launch a step, up to the sampling of its tokens. Raises `TokenUnknown` for a pending token that the last step
        does not sample."""
        if self._greedy is not None:
            if layer_stored is None and (computed := self._greedy.launch(step)) is not None:
                return computed
            self._greedy.planned(step)
        inputs = read_inputs(step, self._sampled_rows)
        told = None if layer_stored is None else lambda: self._device.notify(layer_stored)
        with self._inference, self._device.issuing():
            try:
                for reader in self._readers:
                    inputs = reader.read(step, inputs)
                return self._launch(step, inputs, told)
            except Exception:
                # blocks of a failed step may get a new owner next: no write and no notice may come after that
                self._device.fetch(()).wait()
                self._device.settle()
                raise

    def _launch(self, step: Step, inputs: StepInputs, layer_stored: LayerStored | None) -> RunningStep:
        return self._compute(self._plan(step, inputs), layer_stored)

    def _plan(self, step: Step, inputs: StepInputs) -> PlannedStep:
        """Begin staging, and read of `step` all that may change once it was launched."""
        ends, due = due_requests(step, inputs)
        rows, plan = self._begin(ends, due, len(inputs.token_ids))
        readings = StepReadings(step, inputs.last_tokens, self._staging) if step.spans else None
        drafted = DraftedRows.put(step.requests, self._staging) if self._limits.num_draft_blocks else None
        return PlannedStep(step, inputs, due, rows, plan, readings, drafted)

    def _compute(self, planned: PlannedStep, layer_stored: LayerStored | None) -> RunningStep:
        step, inputs, due, rows, plan, readings, drafted = planned
        forward = self._stage(step, inputs, layer_stored, readings)
        plan = plan.stage_changes(self._staging)
        self._staging.upload()
        self._copy_blocks(step)
        logits = forward.compute(rows)
        read = None if readings is None else (readings, self._device.fetch(readings.outputs))
        if logits is None:
            self._sampled_rows = {}
            self._be_followed_in(step, forward, (), layer_stored)
            return LaunchedStep((), FetchedRows(plan, self._device.fetch(())), read)
        sampled, token_ids = self._sample(plan, due, logits, drafted)
        self._be_followed_in(step, forward, token_ids, layer_stored)
        return LaunchedStep([request.key for request in due], sampled, read)

    def _be_followed_in(
        self,
        step: Step,
        forward: Forward,
        token_ids: Sequence[int] | torch.Tensor,
        layer_stored: LayerStored | None,
    ) -> None:
        """Tell the follower, if there is one, of `step`, whose rows have sampled these tokens."""
        if self._follower is not None and forward.stream is not None:
            self._follower.follow(ComputedStep(step, forward.stream, token_ids, layer_stored))

    def _sample(
        self, plan: SamplingPlan, due: Sequence[ScheduledRequest], logits: torch.Tensor, drafted: DraftedRows | None
    ) -> tuple[SampledRows, Sequence[int] | torch.Tensor]:
        """The rows, and their token ids [N]."""
        redraw = None
        if self.is_asynchronous:
            if plan.grammar_rows:  # the matchers make masks while the device computes
                redraw = redraw_beforehand(plan.grammar_rows, self._sampler.vocab_size, self._staging)
                self._staging.upload()
        elif (plain := self._sampler.sample_plain(plan, logits)) is not None:
            if drafted is not None:
                self._settle(drafted, torch.tensor(plain.token_ids), torch.tensor(plain.is_number))
            return plain, plain.token_ids
        outputs = self._sampler.sample(plan, logits, redraw)
        if drafted is not None:
            self._settle(drafted, outputs[0], outputs[1])
        self._store_sampled(due, outputs[0])
        return FetchedRows(plan, self._device.fetch(outputs)), outputs[0]

    def _settle(self, drafted: DraftedRows, token_ids: torch.Tensor, is_valid: torch.Tensor) -> None:
        """Have states go back behind drafts that are not what was sampled."""
        # a pool with states has no other attention
        cast(KeepsStates, self._attention).settle(drafted.num_accepted(token_ids, is_valid))

    def _begin(
        self, ends: Sequence[int], due: Sequence[ScheduledRequest], num_tokens: int
    ) -> tuple[DueRows, SamplingPlan]:
        """Begin staging with what has a fixed room, so that the inputs of graphs lie behind it where they always lie.

        `due`: what samples; `ends`: the places of the last tokens.
        """
        self._staging.begin()
        max_num_rows = self._limits.max_num_seqs
        are_all = len(due) == num_tokens and ends == list(range(num_tokens))
        index = self._staging.put(_NO_ENDS if are_all else np.array(ends, dtype=np.int64), max_num_rows)
        plan = self._sampler.plan(due, self._staging, max_num_rows)
        return DueRows(len(due), None if are_all else index), plan

    def _copy_blocks(self, step: Step) -> None:
        """Make the copies that forks begin with, in stream order: before anything of this step is written."""
        for share in step.requests:
            if share.block_copy is not None:
                source, target = share.block_copy
                self._blocks[target].copy_(self._blocks[source])

    def _stage(
        self, step: Step, inputs: StepInputs, layer_stored: LayerStored | None, readings: StepReadings | None
    ) -> Forward:
        """Stage the step for a graph when there is one that does all that is wanted, else for operation by
        operation."""
        rows = self._recorded_rows(step, inputs, layer_stored)
        if rows is not None and self._graphs is not None:
            recorded = self._graphs.stage(inputs, rows)
            if recorded is not None:
                return recorded
        return self._eager.stage(inputs, step.requests, layer_stored, readings)

    def _recorded_rows(
        self, step: Step, inputs: StepInputs, layer_stored: LayerStored | None
    ) -> Sequence[PlannedShare] | None:
        """A step as a graph takes it, where one does all that is wanted of it; None where none does."""
        if layer_stored is not None or step.spans or not inputs.is_plain:
            return None
        return one_token_each(step.requests) if self._graphs is not None and self._graphs.takes(inputs) else None

    def _store_sampled(self, requests: Sequence[ScheduledRequest], token_ids: torch.Tensor) -> None:
        """Store sampled tokens for the next step, also when a step between cannot be launched. token_ids: [N]."""
        if self.is_asynchronous:
            self._sampled[: len(requests)].copy_(token_ids)
            self._sampled_rows = {request.key: row for row, request in enumerate(requests)}


def due_requests(step: Step, inputs: StepInputs) -> tuple[list[int], Sequence[ScheduledRequest]]:
    """The places behind which this step samples, and what does: requests, and each of their forks, and each place that
    is behind a draft or before it, as a request."""
    alone = [each for each in step.requests if each.needs_sample and not (each.forks or each.num_drafts)]
    if len(alone) == len(step.requests):
        return inputs.last_tokens, alone
    ends: list[int] = []
    due: list[ScheduledRequest] = []
    for end, request in zip(inputs.last_tokens, step.requests, strict=True):
        if request.needs_sample:
            due += (*request.rows(), *(request._replace(key=fork.key, params=fork.params) for fork in request.forks))
            ends += (*range(end - request.num_drafts, end + 1), *(end for _ in request.forks))
    return ends, due
