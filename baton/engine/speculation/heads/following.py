"""A head in the steps of its model: the slots of prompts are stored in the step that computes them, the last one too,
with the token that the step sampled.

So what a head needs of a prompt is KV, which is there when the prompt's is: in the prefix cache, in a handoff, and
wherever else blocks go. Of requests that decode the hidden states are kept (`baton.engine.speculation.heads.slots`).

Letters: T tokens of a step, N tokens that it sampled, K streams that are read, S hidden size of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.engine.attention.base import SequenceShare
from baton.engine.models.heads.base import DraftHead
from baton.engine.runner.follower import ComputedStep
from baton.engine.runner.forward import Stream
from baton.engine.scheduler.request import ScheduledRequest
from baton.engine.scheduler.step import Step
from baton.engine.speculation.heads.head_pass import Filled, HeadPass
from baton.engine.speculation.heads.slots import HeadSlots


class _Placed(NamedTuple):
    """A share, its first place among the T tokens, and its first row among the N."""

    share: ScheduledRequest
    place: int
    row: int

    @property
    def is_prompt(self) -> bool:
        """Whether the tokens behind all of its own are known, but for the one that is sampled."""
        share = self.share
        return not share.num_drafts and (share.num_tokens > 1 or share.start < share.prompt.num_tokens)


class HeadFollower:
    """Follows the steps of the model of `head`. See `StepFollower`."""

    def __init__(self, head: DraftHead, head_pass: HeadPass, slots: HeadSlots) -> None:
        self._head = head
        self._pass = head_pass
        self._slots = slots

    def follow(self, computed: ComputedStep) -> None:
        """Store the slots of prompts, and keep the hidden states of those that decode."""
        streams = self._streams(computed.stream)
        placed = list(_placed(computed.step))
        prompts = [each for each in placed if each.is_prompt]
        if prompts:
            self._store(prompts, streams, computed)
        elif computed.layer_stored is not None:
            computed.layer_stored()
        for share, place, _ in (each for each in placed if not each.is_prompt):
            # a copy: the others of a step may be many
            self._slots.wait(share.key, share.start, streams[place : place + share.num_tokens].clone())

    def _streams(self, stream: Stream) -> Tensor:
        """What the head reads of all tokens, [T, K S]."""
        return torch.cat(tuple(stream.tapped()), dim=1) if self._head.taps else stream.rows()

    def _store(self, prompts: Sequence[_Placed], streams: Tensor, computed: ComputedStep) -> None:
        num_tokens = [each.share.num_tokens for each in prompts]
        if sum(num_tokens) < len(streams):
            streams = torch.cat([streams[each.place : each.place + each.share.num_tokens] for each in prompts])
        shares = [SequenceShare(each.share.start, each.share.num_tokens, each.share.block_table) for each in prompts]
        token_ids = np.array([token_id for each in prompts for token_id in _tokens_behind(each.share)], dtype=np.int64)
        ends = np.cumsum(num_tokens) - 1
        states = self._pass.store(
            shares, token_ids, self._head.fused(streams), self._filled(prompts, ends, computed), computed.layer_stored
        )
        for each, end in zip(prompts, ends.tolist(), strict=True):
            if each.share.needs_sample:
                self._slots.stored(each.share.key, each.share.context_len, states[end : end + 1].clone())
            else:
                self._slots.forget(each.share.key)

    def _filled(self, prompts: Sequence[_Placed], ends: np.ndarray, computed: ComputedStep) -> Filled | None:
        """The tokens that the step sampled behind prompts."""
        due = [(end, each.row) for each, end in zip(prompts, ends.tolist(), strict=True) if each.share.needs_sample]
        if not due:
            return None
        places, rows = np.array(due, dtype=np.int64).T
        token_ids = torch.as_tensor(computed.token_ids, dtype=torch.int64)
        return Filled(np.ascontiguousarray(places), np.ascontiguousarray(rows), token_ids)


def _placed(step: Step) -> Iterator[_Placed]:
    place = row = 0
    for share in step.requests:
        yield _Placed(share, place, row)
        place += share.num_tokens
        if share.needs_sample:
            row += 1 + share.num_drafts + len(share.forks)


def _tokens_behind(share: ScheduledRequest) -> Sequence[int]:
    """The token behind each of the share; 0 for one that is not known."""
    token_ids = [max(0, token_id) for token_id in share.token_ids[share.start + 1 : share.context_len + 1]]
    return token_ids if len(token_ids) == share.num_tokens else [*token_ids, 0]
