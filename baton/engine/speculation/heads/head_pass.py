"""The forward pass of a head over the pool: it stores slots, in the last layer of blocks.

Owns the staging of its inputs. Knows no requests.

Letters: T slots of a pass, N tokens that a step sampled, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from baton.device.base import Array, Device
from baton.device.staging import ALIGNMENT, staged_bytes
from baton.engine.attention.base import AttentionBackend, LayerStored, SequenceShare, attention_staging_bytes
from baton.engine.models.heads.base import DraftHead
from baton.engine.runner.limits import RunnerLimits
from baton.engine.speculation.heads.slots import MOST_FILLED, MOST_ROWS


class Filled(NamedTuple):
    """Tokens that only the device knows: those at `places` of a pass are the `rows` of token_ids [N]."""

    places: Array
    rows: Array
    token_ids: Tensor


class HeadPass:
    """Computes `head` over the KV of `attention`."""

    def __init__(self, head: DraftHead, attention: AttentionBackend, device: Device, limits: RunnerLimits) -> None:
        self._head = head
        self._attention = attention
        self._staging = device.staging(_staging_bytes(limits))

    def store(
        self,
        shares: Sequence[SequenceShare],
        token_ids: Array,
        hidden: Tensor,
        filled: Filled | None = None,
        layer_stored: LayerStored | None = None,
    ) -> Tensor:
        """Store the slots of `shares`, made of hidden states [T, E] and of the tokens [T] behind each. The head's own
        states [T, E]."""
        staging = self._staging
        staging.begin()
        self._attention.plan(shares, staging, layer_stored)
        ids = staging.put(token_ids)
        positions = staging.put(np.concatenate([np.arange(each.start, each.context_len) for each in shares]))
        places = rows = None
        if filled is not None:
            places, rows = staging.put(filled.places), staging.put(filled.rows)
        staging.upload()
        if filled is not None and places is not None and rows is not None:
            ids = ids.index_copy(0, places, filled.token_ids.index_select(0, rows))
        return self._head.forward(hidden, ids, positions, self._attention)


def _staging_bytes(limits: RunnerLimits) -> int:
    most = max(limits.max_step_tokens, (2 * MOST_ROWS + MOST_FILLED) * limits.max_num_seqs)
    inputs = 2 * staged_bytes(most, np.int64) + 2 * staged_bytes(limits.max_num_seqs, np.int64)
    plan = attention_staging_bytes(most, limits.max_num_seqs, limits.max_blocks_per_request)
    return inputs + -(-plan // ALIGNMENT) * ALIGNMENT
