"""A decoder's forward pass on a CPU whose layers are one recording of kernel calls.

Owns the inputs of the recording: the residual stream and the rotation, which are computed anew for each step. What
`graphs.py` is for decode steps on a GPU, this is for all steps on a CPU; a host step has no padding, since a recording
takes any number of tokens.

A recording must compute what the decoder computes, bit for bit: that is compared once, when it is made.

Letters: T tokens of the step, M tokens of the largest step, E hidden size.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from device.host import HostStaging
from engine.attention.base import SequenceShare
from engine.attention.native_backend import NativeAttention
from engine.models.decoder import Decoder
from engine.native.library import Kernels
from engine.native.recording import Recording

_NUM_NOTED = 2
"""Tokens of the pass that is noted: with one, torch may give rows any distance."""
_NUM_COMPARED = 3
_log = logging.getLogger(__name__)


class RecordedLayers:
    """The forward pass of `decoder` over the KV of `attention`, for steps of at most `max_tokens` tokens."""

    def __init__(self, decoder: Decoder, attention: NativeAttention, kernels: Kernels, max_tokens: int) -> None:
        """Computes a small pass in block 0, which must not be in use."""
        self._decoder = decoder
        self._attention = attention
        token_ids, positions = torch.zeros(max_tokens, dtype=torch.int64), torch.zeros(max_tokens, dtype=torch.int64)
        self._residual = decoder.embed(token_ids, positions)
        self._rotations = decoder.rotations(positions)
        attention.plan([SequenceShare(0, _NUM_NOTED, (0, 0))], HostStaging())
        with kernels.noting() as notes:
            first = slice(_NUM_NOTED)
            rotations = tuple((cos[first], signed_sin[first]) for cos, signed_sin in self._rotations)
            delta = decoder.run_layers(self._residual[first], rotations, attention)
        self._recording = Recording(kernels, notes, delta, max_tokens)

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """See `Decoder.forward`. The result is valid until the next call."""
        num_tokens = token_ids.shape[0]
        residual = self._residual[:num_tokens].copy_(self._decoder.embed(token_ids, positions))
        for kept, given in zip(self._rotations, self._decoder.rotations(positions), strict=True):
            for table, values in zip(kept, given, strict=True):
                table[:num_tokens].copy_(values)
        self._attention.replay(self._recording)
        return residual.add_(self._recording.output[:num_tokens])


@torch.inference_mode()
def record_layers(
    decoder: Decoder, attention: NativeAttention, kernels: Kernels, max_tokens: int
) -> RecordedLayers | None:
    """A recording that computes what `decoder` computes; None, with a log line, where there is none: some operation is
    not a call of `kernels`. Uses block 0, before any request does."""
    if not decoder.is_recordable:
        _log.info("the forward pass of %s is computed operation by operation", decoder.config.architecture)
        return None
    try:
        recorded = RecordedLayers(decoder, attention, kernels, max(max_tokens, _NUM_COMPARED))
        token_ids, positions = torch.arange(_NUM_COMPARED), torch.arange(_NUM_COMPARED)
        attention.plan([SequenceShare(0, _NUM_COMPARED, (0,) * _NUM_COMPARED)], HostStaging())
        expected = decoder.forward(token_ids, positions, attention)
        if torch.equal(expected.view(torch.uint8), recorded.forward(token_ids, positions).view(torch.uint8)):
            return recorded
        reason = "not all of it is calls of the kernels"
    except LookupError as error:
        reason = str(error)
    _log.warning("the forward pass is not recorded, and steps take longer: %s", reason)
    return None
