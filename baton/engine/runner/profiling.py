"""Computes a step of the largest size, without KV, to measure what a device needs beside weights and pool.

Owns the definition of the worst case. The code that sizes the KV pool reads the device's peak memory around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.device.base import Device
from baton.engine.attention.base import Attention, StatePiece
from baton.engine.models.base import RunnableDecoder
from baton.engine.runner.limits import RunnerLimits, staging_bytes
from baton.engine.runner.prompt_scoring import PromptScoring
from baton.engine.runner.readings import StepReadings, row_pieces
from baton.engine.runner.redraws import redraw_beforehand
from baton.engine.runner.sampler import Sampler
from baton.engine.scheduler.reading import ReadSpan
from baton.engine.scheduler.request import MaskSource, ScheduledRequest
from baton.engine.scheduler.step import Step
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import MAX_TOP_LOGPROBS, DecodingParams

_KEY, _PROMPT = RequestKey.numbered(0), Prompt((0,))
_HARDEST = DecodingParams(top_p=0.9, min_p=0.01, seed=0, logprobs=MAX_TOP_LOGPROBS)


class _AnyToken:
    """A grammar that allows whatever comes first in the vocabulary."""

    def accepts(self, token_id: int) -> bool:
        """Always false: the row is to be drawn again."""
        return False

    def mask(self) -> bytes:
        """Allows the first tokens of the vocabulary."""
        return b"\xff"

    def fail(self, reason: str) -> None:
        """Never called."""


@dataclass(frozen=True, slots=True)
class _HardestRequest:
    """The request whose row takes the most memory to sample. Its row is masked and sorted, and the model's own
    distribution is stored beside it."""

    key: RequestKey = _KEY
    token_ids: Sequence[int] = (0,)
    prompt: Prompt = _PROMPT
    params: DecodingParams = _HARDEST
    matcher: MaskSource | None = field(default_factory=_AnyToken)
    takes_largest: bool = False


class StorelessAttention:
    """Attention that stores nothing, attends to nothing, and returns zeros of the right shape."""

    pieces: Sequence[StatePiece] = ()
    """See `KeepsStates.pieces`."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Zeros [T, heads, head_dim]."""
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)

    def recent(self, layer: int, x: Tensor, num_before: int) -> Tensor:
        """Zeros in place of the inputs before these tokens."""
        return torch.zeros(len(x), 1 + num_before, x.shape[1], dtype=x.dtype, device=x.device)

    def carried(self, layer: int, num_before: int) -> Tensor:
        """Nothing in place of the states before these tokens."""
        return torch.empty(0)

    def stored(self) -> None:
        """Stores nothing."""


@torch.inference_mode()
def profile(
    decoder: RunnableDecoder,
    sampler: Sampler,
    device: Device,
    limits: RunnerLimits,
    attention: Attention | None = None,
) -> None:
    """Compute one worst step: `max_step_tokens` tokens of prompts whose log probabilities are wanted, of which
    `max_num_seqs` sample one.

    The step is finished on return. `attention` takes the place of `StorelessAttention`. All memory is freed again, so
    the caller reads the peak. Staging memory is part of it.
    """
    num_tokens, num_rows = limits.max_step_tokens, limits.max_num_seqs
    staging = device.staging(staging_bytes(limits))
    with device.issuing():
        staging.begin()
        readings = StepReadings(_scored_step(num_tokens), [num_tokens - 1], staging)
        plan = sampler.plan([_HardestRequest()] * num_rows, staging).stage_changes(staging)
        staging.upload()
        hidden = decoder.forward(*_inputs(decoder, num_tokens), attention or StorelessAttention())
        readings.compute(decoder, hidden)
        read = device.fetch(readings.outputs)
        redraw = redraw_beforehand(plan.grammar_rows, sampler.vocab_size, staging)
        staging.upload()
        device.fetch(sampler.sample(plan, decoder.logits(hidden[:num_rows]), redraw)).wait()
        read.wait()
    device.synchronize()


@torch.inference_mode()
def profile_shard(decoder: RunnableDecoder, device: Device, limits: RunnerLimits) -> None:
    """What another rank does in the step of `profile`, which it computes together with the first: its share of the
    forward pass, and of logits where it has the head."""
    num_tokens = limits.max_step_tokens
    with device.issuing():
        hidden = decoder.forward(*_inputs(decoder, num_tokens), StorelessAttention())
        if decoder.has_head:
            for piece in row_pieces(num_tokens, decoder.config.vocab_size):
                decoder.logits(hidden[piece])
            decoder.logits(hidden[: limits.max_num_seqs])
    device.synchronize()


def _inputs(decoder: RunnableDecoder, num_tokens: int) -> tuple[Tensor, Tensor]:
    """What `RunnableDecoder.forward` takes, and positions [T]."""
    positions = torch.arange(num_tokens, device=decoder.device) % decoder.config.max_context_len
    return decoder.trial_inputs(num_tokens), positions


def _scored_step(num_tokens: int) -> Step:
    """A step of one prompt that is one token longer, so that every row is scored."""
    token_ids = (0,) * (num_tokens + 1)
    share = ScheduledRequest(_KEY, 0, num_tokens, token_ids, Prompt(token_ids), (), _HARDEST, needs_sample=False)
    return Step((share,), (ReadSpan(_KEY, PromptScoring(MAX_TOP_LOGPROBS), 0, num_tokens),))
