"""How many drafts of a step were right, found where its tokens are: for what has to be set right behind the step.

Owns the same rule as `baton.engine.scheduler.drafts`, on tensors: a device finds it out without waiting for the host.

Letters: N rows, one for each sampled token; D shares with drafts, K drafts of one at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.device.base import Staging
from baton.engine.scheduler.request import ScheduledRequest

_NO_TOKEN = -1
_NOT_A_NUMBER = -2


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """rows [D, K]: those whose token each draft has to equal; tokens [D, K]: the drafts, and none behind the last."""

    rows: Tensor
    tokens: Tensor

    @classmethod
    def put(cls, shares: Sequence[ScheduledRequest], staging: Staging) -> DraftedRows | None:
        """Stage those of a step over `shares`; None where nobody has drafts."""
        most = max([share.num_drafts for share in shares])
        if not most:
            return None
        rows, tokens, num_rows = list[range](), list[Sequence[int]](), 0
        for share in shares:
            if share.num_drafts:
                drafts = share.token_ids[len(share.token_ids) - share.num_drafts :]
                rows.append(range(num_rows, num_rows + most))
                tokens.append([*drafts, *[_NO_TOKEN] * (most - len(drafts))])
            if share.needs_sample:
                num_rows += 1 + share.num_drafts + len(share.forks)
        # rows behind the last draft of a share are compared with no token: any row will do
        in_step = np.minimum(np.array(rows, dtype=np.int64), num_rows - 1)
        staged = [staging.put(values.reshape(-1)) for values in (in_step, np.array(tokens, dtype=np.int64))]
        return cls(*[values.view(-1, most) for values in staged])

    def num_accepted(self, token_ids: Tensor, is_valid: Tensor) -> Tensor:
        """[D] int64. token_ids: [N] int64, is_valid: [N]; see `Sampler.sample`."""
        sampled = torch.where(is_valid.to(torch.bool), token_ids, _NOT_A_NUMBER)
        return (sampled[self.rows] == self.tokens).to(torch.int64).cumprod(dim=1).sum(dim=1)
