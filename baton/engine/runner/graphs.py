"""Decode steps as recorded graphs: one per batch size, which is replayed with the inputs in the staging memory.

Owns the recorded batch sizes and the padding of a batch to one of them. A graph holds everything from pending tokens
and embedding to logits; sampling runs behind it, since its operations differ from step to step.

In a stage of several, a graph is what the stage computes: a later one begins with the residual stream that it has
received in a fixed place, and all but the last end with the one that they hand on. Receiving and sending are outside.

A graph reads fixed addresses. They repeat because all that is put up to the end of a graph's inputs has one order and
fixed capacities; that is checked at every step. What all graphs write shares one buffer: graphs never run side by side.

Padding is a sequence of one token, token id 0 at position 0, whose only block is the spare block: it reads and writes
no block of a request.

A draft is a sequence, too: it has the blocks of its request and a longer context. That computes the same, because
backends store the keys and values of all tokens before one of them attends.

Letters: S sequences of a graph, N of the step (N <= S), E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from baton.device.base import Array, Device, Graph, Staging
from baton.engine.attention.base import AttentionBackend, PlannedShare, SequenceShare
from baton.engine.models.base import RunnableDecoder
from baton.engine.runner.forward import DueRows
from baton.engine.runner.inputs import StepInputs, fill_pending
from baton.engine.runner.limits import graph_size, graph_sizes
from baton.engine.scheduler.request import ScheduledRequest

ReportProgress: TypeAlias = Callable[[int, int], None]


class NotedStaging:
    """A `Staging` that records the addresses of what is put. Only `put` may be called."""

    def __init__(self, staging: Staging) -> None:
        self.addresses: list[int] = []
        self._staging = staging

    def begin(self) -> None:
        """Begin at the front of the memory that the graph reads."""
        raise NotImplementedError("a plan does not begin a step")

    def put(self, values: Array, capacity: int = 0) -> Tensor:
        """Place an array where the graph reads it."""
        view = self._staging.put(values, capacity)
        self.addresses.append(view.data_ptr())
        return view

    def upload(self) -> None:
        """Have the device see what was placed."""
        raise NotImplementedError("a plan does not upload")


@dataclass(frozen=True, slots=True)
class GraphForward:
    """A pass that replays a recorded graph. output: what the graph writes, logits [S, V], or without a head the
    residual stream [S, E]."""

    graph: Graph
    output: Tensor
    stream: None = None

    def compute(self, due: DueRows) -> Tensor | None:
        """Launch the graph."""
        self.graph.replay()
        if due.count == 0:
            return None
        return self.output[: due.count] if due.index is None else self.output.index_select(0, due.index)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A graph of S sequences, what it writes, its attention, and the addresses of its inputs."""

    graph: Graph
    output: Tensor
    attention: AttentionBackend
    addresses: list[int]


class DecodeGraphs:
    """Graphs for steps of up to `max_num_seqs` sequences with one token each."""

    def __init__(
        self,
        decoder: RunnableDecoder,
        device: Device,
        staging: Staging,
        begin: Callable[[], object],
        sampled: Tensor,
        max_num_seqs: int,
        spare_block: int,
        stream: Tensor | None = None,
    ) -> None:
        """`begin` begins a step in `staging`, and puts what comes before a graph's inputs. `stream`: what a later stage
        begins with in the place of token ids, [at least S, E]."""
        self._decoder = decoder
        self._device = device
        self._staging = staging
        self._begin = begin
        self._sampled = sampled
        self._sizes = graph_sizes(max_num_seqs)
        self._padding = SequenceShare(0, 1, (spare_block,))
        self._stream = stream
        self._output: Tensor | None = None
        self._recorded: dict[int, _Recorded] = {}

    def record(self, attention: AttentionBackend, progress: ReportProgress | None = None) -> int:
        """Record a graph for each size; `progress(done, total)` counts them. Returns how many there are.

        The largest comes first: the others find their memory in what it has left.
        """
        for done, size in enumerate(reversed(self._sizes), 1):
            backend = attention.for_graph(size)
            if backend is None:
                break
            self._recorded[size] = self._record(size, backend)
            if progress is not None:
                progress(done, len(self._sizes))
        return len(self._recorded)

    def takes(self, inputs: StepInputs) -> bool:
        """Whether a graph can compute a step of as many sequences as tokens."""
        return graph_size(self._sizes, len(inputs.token_ids)) in self._recorded

    def stage(self, inputs: StepInputs, shares: Sequence[PlannedShare]) -> GraphForward | None:
        """Stage a step over `shares` (see `one_token_each`), right behind what `begin` puts. None when no graph can
        compute it."""
        if len(inputs.token_ids) != len(shares):
            return None
        size = graph_size(self._sizes, len(shares))
        recorded = self._recorded.get(size) if size is not None else None
        if size is None or recorded is None:
            return None
        staging = NotedStaging(self._staging)
        self._put(size, inputs, shares, recorded.attention, staging)
        if staging.addresses != recorded.addresses:
            raise RuntimeError(
                f"the inputs of a graph of {size} sequences are not where they were when it was recorded"
            )
        return GraphForward(recorded.graph, recorded.output)

    def _record(self, size: int, attention: AttentionBackend) -> _Recorded:
        nothing = np.empty(0, dtype=np.int64)
        staging = NotedStaging(self._staging)
        self._begin()
        token_ids, sources, positions = self._put(
            size, StepInputs(nothing, nothing, nothing, False, []), (), attention, staging
        )
        self._staging.upload()

        def compute() -> Tensor:
            given = None if self._stream is None else self._stream[:size]
            first = fill_pending(token_ids, sources, self._sampled) if given is None else given
            hidden = self._decoder.forward(first, positions, attention)
            return self._decoder.logits(hidden) if self._decoder.has_head else hidden

        # a first call may compile, choose and allocate, which must not happen during the recording
        found = compute()
        if self._output is None:
            self._output = torch.empty_like(found)
        output = self._output[:size].copy_(found)
        self._device.synchronize()
        graph, _ = self._device.record(lambda: output.copy_(compute()))
        return _Recorded(graph, output, attention, staging.addresses)

    def _put(
        self,
        size: int,
        inputs: StepInputs,
        shares: Sequence[PlannedShare],
        attention: AttentionBackend,
        staging: Staging,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Stage token ids, sources and positions, [S] each, and the attention's plan."""
        token_ids = staging.put(_padded(inputs.token_ids, size, 0), size)
        sources = staging.put(_padded(inputs.sources, size, -1), size)
        positions = staging.put(_padded(inputs.positions, size, 0), size)
        attention.plan([*shares, *[self._padding] * (size - len(shares))], staging)
        return token_ids, sources, positions


def one_token_each(shares: Sequence[ScheduledRequest]) -> Sequence[PlannedShare] | None:
    """The tokens of `shares` as sequences of their own; None where one has others than a decoded token and drafts."""
    if all(share.num_tokens == 1 for share in shares):
        return shares
    if any(share.num_tokens > 1 + share.num_drafts for share in shares):
        return None
    return [
        SequenceShare(position, 1, share.block_table)
        for share in shares
        for position in range(share.start, share.context_len)
    ]


def _padded(values: Array, size: int, padding: int) -> Array:
    padded = np.full(size, padding, dtype=np.int64)
    padded[: len(values)] = values
    return padded
