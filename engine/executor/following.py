"""What every rank but the first does with a step: compute its share of the forward pass and of the logits.

Owns the order of calls among the ranks, which must be that of `LeadingRunner`: forward pass, logits of scored rows
piece by piece, logits of due rows. In a stage that is not the last, the residual stream goes to the next one instead
of logits. Samples nothing, keeps nothing between steps.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from device.base import Array, Device
from engine.attention.base import AttentionBackend, SequenceShare
from engine.executor.messages import Compute
from engine.executor.passages import Incoming, Outgoing
from engine.models.base import RunnableDecoder
from engine.runner.forward import DueRows, ForwardPass
from engine.runner.limits import RunnerLimits, staging_bytes
from engine.runner.prompt_scoring import score_pieces
from program.channel import ChannelBroken


class Follower:
    """Computes orders over the KV of `attention`. `blocks`: [B, ...] of a pool that is this rank's own; None: the
    driver prepares blocks. `run`: the forward pass of `decoder`. `incoming`: from the stage
    before, None in the first; `outgoing`: to the next stage, None in the last."""

    def __init__(
        self,
        decoder: RunnableDecoder,
        attention: AttentionBackend,
        device: Device,
        limits: RunnerLimits,
        run: ForwardPass,
        incoming: Incoming | None = None,
        outgoing: Outgoing | None = None,
        blocks: Tensor | None = None,
    ) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._decoder = decoder
        self._attention = attention
        self._staging = device.staging(staging_bytes(limits))
        self._run = run
        self._blocks = blocks

    @torch.inference_mode()
    def compute(self, order: Compute) -> None:
        """Compute a step. Raises `ChannelBroken` for an order that contradicts itself, `DeviceFailed` when another rank
        is gone."""
        token_ids = np.frombuffer(bytearray(order.token_ids), dtype=np.int64)
        shares = [
            SequenceShare(each.start, each.num_tokens, np.frombuffer(each.blocks, dtype=np.int32).tolist())
            for each in order.shares
        ]
        if sum(share.num_tokens for share in shares) != len(token_ids):
            raise ChannelBroken(f"the driver orders {len(token_ids)} tokens and places for another number")
        self._staging.begin()
        self._attention.plan(shares, self._staging)
        first, positions = [self._staging.put(values) for values in (token_ids, _positions(shares))]
        self._staging.upload()
        if order.copies:
            self._copy_blocks(order.copies)
        if self._incoming is not None:
            first = self._incoming.receive(len(first))
        stream = self._run(first, positions)
        if self._outgoing is not None:
            self._outgoing.send(stream.rows())
            return
        if order.scored:
            scored = _row_numbers(order.scored)
            for piece in score_pieces(len(scored), self._decoder.config.vocab_size):
                self._decoder.logits(stream.rows().index_select(0, scored[piece]))
        if order.due:
            due = _row_numbers(order.due)
            stream.logits(DueRows(len(due), due))

    def _copy_blocks(self, copies: bytes) -> None:
        if self._blocks is None:
            raise ChannelBroken("the driver orders copies in a pool that is its own")
        for source, target in _row_numbers(copies).view(-1, 2).tolist():
            self._blocks[target].copy_(self._blocks[source])


def _positions(shares: list[SequenceShare]) -> Array:
    return np.concatenate([np.arange(share.start, share.context_len, dtype=np.int64) for share in shares])


def _row_numbers(rows: bytes) -> Tensor:
    return torch.frombuffer(bytearray(rows), dtype=torch.int64)
