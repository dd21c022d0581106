"""The runner: computes one step with the real model.

Owns the decoder, the attention backend and the sampler of one device. Knows no queues, leases or nodes: it is given a
`Step` and returns tokens.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.attention.base import AttentionBackend, SequenceShare
from engine.device.base import Array, Device
from engine.models.decoder import Decoder
from engine.runner.base import ComputedStep, LayerStored, RunningStep
from engine.runner.sampler import Sampler
from engine.scheduler.request import Step


class ModelRunner:
    """Runs a decoder over paged KV."""

    overlaps = False

    def __init__(self, decoder: Decoder, attention: AttentionBackend, sampler: Sampler, device: Device) -> None:
        self._staging = device.staging(0)
        self._decoder = decoder
        self._attention = attention
        self._sampler = sampler

    @torch.inference_mode()
    def launch(self, step: Step, layer_stored: LayerStored | None = None) -> RunningStep:
        """See `Runner.launch`."""
        self._staging.begin()
        shares = [SequenceShare(r.start, r.num_tokens, r.block_table) for r in step.requests]
        self._attention.plan(shares, self._staging, layer_stored)
        token_ids, positions = map(self._staging.put, _flatten(step))
        self._staging.upload()
        hidden = self._decoder.forward(token_ids, positions, self._attention)
        ends = np.cumsum([request.num_tokens for request in step.requests]) - 1
        last_rows = zip(ends.tolist(), step.requests, strict=True)
        sampling = [(end, request) for end, request in last_rows if request.needs_sample]
        if not sampling:
            return ComputedStep({})
        rows = torch.tensor([end for end, _ in sampling], device=self._decoder.device)
        logits = self._decoder.logits(hidden.index_select(0, rows))
        tokens = self._sampler.sample(logits, [request for _, request in sampling])
        drawn = zip(sampling, tokens, strict=True)
        return ComputedStep({request.key: token for (_, request), token in drawn if token is not None})


def _flatten(step: Step) -> tuple[Array, Array]:
    """Token ids and positions, each [T] int64, all requests one after another."""
    token_ids = np.empty(step.num_tokens, dtype=np.int64)
    positions = np.empty(step.num_tokens, dtype=np.int64)
    first = 0
    for request in step.requests:
        last, stop = first + request.num_tokens, request.start + request.num_tokens
        token_ids[first:last] = request.token_ids[request.start : stop]
        positions[first:last] = np.arange(request.start, stop)
        first = last
    return token_ids, positions
