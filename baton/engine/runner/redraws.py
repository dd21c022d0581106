"""Draws of rows with a grammar: first as if they had none, and again where the grammar refuses the token.

A token that the grammar accepts is the one that its mask would have left: the largest of all logits that is allowed is
the largest of those allowed; and a token drawn from all of them is, where it is allowed, distributed as one drawn from
those allowed. A row whose token is refused is drawn again from what its mask allows, with noise of its own, so each
token is distributed as under the mask. A mask takes a matcher several times as long as a token, and models mostly
write what they were asked for.

Where a row keeps the best of its tokens only (top-k, top-p, min-p), these have to be the best of those allowed: it is
drawn once, under its mask. On a device that is computing, nothing can ask for the token: rows are drawn both ways
there, and the mask decides. The tokens are the same.

Owns the choice of rows and what is staged for them; sampling them is the sampler's.

Letters: G rows that are drawn again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from baton.device.base import Staging
from baton.device.host import HostStaging
from baton.engine.runner.grammar_masks import Masks, stack_masks
from baton.engine.runner.logit_changes import StagingRoom
from baton.engine.runner.sampled_rows import GrammarRow
from baton.engine.runner.sampling_plan import MASK_BYTES, SampleGroup, stage_rows


@dataclass(frozen=True, slots=True)
class Redraw:
    """How G rows are drawn from what their `masks` allow; `groups`: see `SamplingPlan`. `is_tried` [G] int64, where it
    is not known which tokens are refused: 1 where the first one stays if the mask allows it."""

    masks: Masks
    groups: tuple[SampleGroup, ...]
    is_tried: Tensor | None = None


def refused_rows(rows: Sequence[GrammarRow], token_ids: Sequence[int], is_valid: Sequence[int]) -> list[GrammarRow]:
    """Those of `rows` whose own of `token_ids` [N] is not accepted, or not valid: they have to be drawn again."""
    refused = []
    for each in rows:
        row, matcher, _, ends, _, is_tried = each
        token_id = token_ids[row]
        if not (is_tried and is_valid[row] and token_id not in ends and matcher.accepts(token_id)):
            refused.append(each)
    return refused


def redraw_of(rows: Sequence[GrammarRow], vocab_size: int) -> Redraw:
    """Of rows that were refused, on the host."""
    return Redraw(stack_masks(rows, vocab_size), _groups_of(rows, HostStaging()))


def redraw_beforehand(rows: Sequence[GrammarRow], vocab_size: int, staging: Staging) -> Redraw:
    """Of all rows with a grammar, staged while the device computes the step; `staging` is to be uploaded then. The copy
    repeats what the step was sent, in the order of the stream: nothing reads it meanwhile."""
    masks = stack_masks(rows, vocab_size).staged(StagingRoom(staging, MASK_BYTES).put)
    is_tried = staging.put(np.array([each.is_tried for each in rows], dtype=np.int64))
    return Redraw(masks, _groups_of(rows, staging), is_tried)


def _groups_of(rows: Sequence[GrammarRow], staging: Staging) -> tuple[SampleGroup, ...]:
    drawn = [again for each in rows if (again := each.drawn_again) is not None]
    return stage_rows(drawn, (), staging, 0)[0] if drawn else ()
