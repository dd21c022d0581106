"""What every rank but the first does with a step: compute its share of the forward pass and of the logits.

Owns the order of calls among the ranks, which must be that of `LeadingRunner`: forward pass, logits of rows that are
read, kind by kind and piece by piece, logits of due rows, and on a GPU the tokens that the first rank has sampled. In a
stage that is not the last, the residual stream goes to the next one instead of logits. Samples nothing. Between steps
it keeps those tokens, which the next step may begin with before the driver knows them; of several stages none does.

Whether a step is a replay of a graph, all ranks of a stage have to decide alike: in the driver's stage the order says
it, and in an earlier one, whose layers may have another attention, it is whether this rank has such a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.device.base import Array, Device
from baton.engine.attention.base import AttentionBackend, SequenceShare
from baton.engine.models.base import RunnableDecoder
from baton.engine.models.collectives import Collectives
from baton.engine.runner.forward import DueRows, ForwardPass
from baton.engine.runner.graphs import DecodeGraphs, GraphForward
from baton.engine.runner.inputs import StepInputs, fill_pending
from baton.engine.runner.limits import RunnerLimits, staging_bytes
from baton.engine.runner.readings import row_pieces
from baton.ranks.executor.messages import Compute
from baton.ranks.executor.passages import NO_PASSAGES, PassageEnds
from baton.runtime.channel import ChannelBroken

_NONE = DueRows(0, None)


@dataclass(frozen=True, slots=True)
class RankModel:
    """A rank's share of the model over its KV. `run`: the forward pass of `decoder`, with `attention`. `blocks`: [B,
    ...] of a pool that is this rank's own; None: the driver prepares blocks."""

    decoder: RunnableDecoder
    attention: AttentionBackend
    run: ForwardPass
    blocks: Tensor | None


class Follower:
    """Computes the driver's orders with `model`. `collectives`: of its stage, None where that is one rank. `ends`: of
    the passages from the stage before and to the next."""

    def __init__(
        self,
        model: RankModel,
        device: Device,
        limits: RunnerLimits,
        collectives: Collectives | None,
        ends: PassageEnds = NO_PASSAGES,
    ) -> None:
        self._incoming, self._outgoing = ends
        self._decoder = model.decoder
        self._attention = model.attention
        self._device = device
        self._limits = limits
        self._staging = device.staging(staging_bytes(limits))
        self._run = model.run
        self._blocks = model.blocks
        self._sampled = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device.torch_device)
        # of the first rank, where steps are launched before their tokens are known
        is_alone = ends.incoming is None and ends.outgoing is None
        self._sampler = collectives if device.is_asynchronous and is_alone else None
        self._graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def record_graphs(self) -> None:
        """Record decode steps where the device can, together with the other ranks of this stage."""
        spare = self._limits.spare_block
        if not self._device.records or spare is None:
            return
        self._graphs = DecodeGraphs(
            self._decoder,
            self._device,
            self._staging,
            lambda: self._begin(b""),
            self._sampled,
            self._limits.max_num_seqs,
            spare,
            None if self._incoming is None else self._incoming.place,
        )
        with self._device.issuing():
            self._graphs.record(self._attention)

    @torch.inference_mode()
    def compute(self, order: Compute) -> None:
        """Compute a step. Raises `ChannelBroken` for an order that contradicts itself, `DeviceFailed` when another rank
        is gone."""
        shares = [
            SequenceShare(each.start, each.num_tokens, np.frombuffer(each.blocks, dtype=np.int32).tolist())
            for each in order.shares
        ]
        inputs = _inputs(order, shares)
        with self._device.issuing():
            due = self._begin(order.due)
            recorded = self._recorded_for(inputs, shares) if order.is_recorded else None
            if recorded is not None:
                self._replay(order, recorded, len(inputs.token_ids))
            else:
                self._compute(order, inputs, shares, due)
            if self._sampler is not None and due.count:
                self._sampler.from_first(self._sampled)

    def _begin(self, rows: bytes) -> DueRows:
        """Begin staging with what has a fixed room: see `ModelRunner._begin`."""
        self._staging.begin()
        index = self._staging.put(_row_numbers(rows), self._limits.max_num_seqs)
        return DueRows(len(index), index)

    def _recorded_for(self, inputs: StepInputs, shares: Sequence[SequenceShare]) -> GraphForward | None:
        """The staged graph of a step of which the driver replays its own; None: this stage has none."""
        recorded = None if self._graphs is None else self._graphs.stage(inputs, shares)
        if recorded is None and self._outgoing is None:
            raise ChannelBroken("the driver orders the replay of a graph that this rank has not recorded")
        return recorded

    def _replay(self, order: Compute, recorded: GraphForward, num_tokens: int) -> None:
        self._staging.upload()
        self._copy_blocks(order.copies)
        if self._incoming is not None:
            self._incoming.receive(num_tokens)  # where the graph begins
        recorded.compute(_NONE)
        if self._outgoing is not None:
            self._outgoing.send(recorded.output[:num_tokens])

    def _compute(self, order: Compute, inputs: StepInputs, shares: Sequence[SequenceShare], due: DueRows) -> None:
        self._attention.plan(shares, self._staging)
        first, positions = [self._staging.put(values) for values in (inputs.token_ids, inputs.positions)]
        sources = self._staging.put(inputs.sources) if inputs.has_pending else None
        read = [self._staging.put(_row_numbers(rows)) for rows in order.read]
        self._staging.upload()
        self._copy_blocks(order.copies)
        if sources is not None:
            first = fill_pending(first, sources, self._sampled)
        if self._incoming is not None:
            first = self._incoming.receive(len(first))
        stream = self._run(first, positions)
        if self._outgoing is not None:
            self._outgoing.send(stream.rows())
            return
        for rows in read:
            for piece in row_pieces(len(rows), self._decoder.config.vocab_size):
                self._decoder.logits(stream.rows().index_select(0, rows[piece]))
        if due.count:
            stream.logits(due)

    def _copy_blocks(self, copies: bytes) -> None:
        if not copies:
            return
        if self._blocks is None:
            raise ChannelBroken("the driver orders copies in a pool that is its own")
        for source, target in _row_numbers(copies).reshape(-1, 2).tolist():
            self._blocks[target].copy_(self._blocks[source])


def _inputs(order: Compute, shares: Sequence[SequenceShare]) -> StepInputs:
    token_ids, sources = _row_numbers(order.token_ids), _row_numbers(order.sources)
    if sum(share.num_tokens for share in shares) != len(token_ids) or len(sources) not in (0, len(token_ids)):
        raise ChannelBroken(f"the driver orders {len(token_ids)} tokens and places for another number")
    return StepInputs(token_ids, _positions(shares), sources, bool(len(sources)), [])


def _positions(shares: Sequence[SequenceShare]) -> Array:
    return np.concatenate([np.arange(share.start, share.context_len, dtype=np.int64) for share in shares])


def _row_numbers(rows: bytes) -> Array:
    return np.frombuffer(bytearray(rows), dtype=np.int64)
