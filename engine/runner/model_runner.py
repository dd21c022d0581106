"""The runner: computes one step with the real model.

Owns the decoder, the attention backend and the sampler of one device. Knows no queues, leases or nodes: it is given a
`Step` and returns tokens. `Runner` is the interface; anything that maps a step to tokens can stand behind an engine.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from engine.attention.base import AttentionBackend, LayerStored, SequenceShare
from engine.models.decoder import Decoder
from engine.runner.sampler import Sampler
from engine.scheduler.request import RequestKey, SampledToken, Step


class Runner(Protocol):
    """Computes steps."""

    def execute(self, step: Step, layer_stored: LayerStored | None = None) -> dict[RequestKey, SampledToken]:
        """Store the KV of the step's tokens; return a token for each request whose share `needs_sample`.

        A request for which the model computed no number gets none. `layer_stored` is called as often as the model has
        layers, each time when one more of them will not change in this step's blocks any more.
        """
        ...


class ModelRunner:
    """Runs a decoder over paged KV."""

    def __init__(self, decoder: Decoder, attention: AttentionBackend, sampler: Sampler) -> None:
        self._decoder = decoder
        self._attention = attention
        self._sampler = sampler

    @torch.inference_mode()
    def execute(self, step: Step, layer_stored: LayerStored | None = None) -> dict[RequestKey, SampledToken]:
        """See `Runner.execute`. Raises whatever the device raises; the caller then holds no KV of this step."""
        shares = [SequenceShare(r.start, r.num_tokens, r.block_table) for r in step.requests]
        self._attention.plan(shares, layer_stored)
        token_ids, positions = _flatten(step)
        device = self._decoder.device
        hidden = self._decoder.forward(token_ids.to(device), positions.to(device), self._attention)
        ends = np.cumsum([request.num_tokens for request in step.requests]) - 1
        last_rows = zip(ends.tolist(), step.requests, strict=True)
        sampling = [(end, request) for end, request in last_rows if request.needs_sample]
        if not sampling:
            return {}
        rows = torch.tensor([end for end, _ in sampling], device=device)
        logits = self._decoder.logits(hidden.index_select(0, rows))
        tokens = self._sampler.sample(logits, [request for _, request in sampling])
        drawn = zip(sampling, tokens, strict=True)
        return {request.key: token for (_, request), token in drawn if token is not None}


def _flatten(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions, each [T] int64, all requests one after another."""
    token_ids = np.empty(step.num_tokens, dtype=np.int64)
    positions = np.empty(step.num_tokens, dtype=np.int64)
    first = 0
    for request in step.requests:
        last, stop = first + request.num_tokens, request.start + request.num_tokens
        token_ids[first:last] = request.token_ids[request.start : stop]
        positions[first:last] = np.arange(request.start, stop)
        first = last
    return torch.from_numpy(token_ids), torch.from_numpy(positions)
