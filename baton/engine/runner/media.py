"""The media of a step: which of its tokens get rows of a tower for embeddings, and the positions behind them.

Owns the way from the media of requests to rows of a step, whatever part of a medium a chunk begins or ends in. Media
are computed when the first chunk needs them. A step has at most as many of their rows as it has tokens, and so no more
media than that, which bounds what it takes.

Letters: T tokens of the step, M of them that get a row, E hidden size, K as in `MediaRows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.device.base import Array
from baton.engine.models.media import MediaRows, MediaTower
from baton.engine.runner.inputs import StepInputs
from baton.engine.scheduler.request import ScheduledRequest
from baton.engine.scheduler.step import Step
from baton.wire.media import Medium


class StepMedia:
    """Finds what `towers`, at least one, have for the tokens of a step; their rows are on `device`. See
    `InputReader`."""

    def __init__(self, towers: Mapping[str, MediaTower[Any]], device: torch.device) -> None:
        self._towers = towers
        sections = next(iter(towers.values())).facts.sections
        self._dimensions = np.array([*sections] * 2, dtype=np.int64)
        self._device = device

    def read(self, step: Step, inputs: StepInputs) -> StepInputs:
        """`inputs` with the rows and positions of media."""
        if not any(share.prompt.media for share in step.requests):
            return inputs
        places, rows = [], []
        positions = np.repeat(inputs.positions[None], 3, axis=0) if len(self._dimensions) else None
        first = 0
        for share in step.requests:
            for medium, begin, end in _parts(share):
                tower = self._towers[medium.kind]
                ids = np.array(share.token_ids[medium.start : end], dtype=np.int64)
                computed = np.flatnonzero(ids == tower.facts.token_id)
                num_before = int(np.searchsorted(computed, begin - medium.start))
                places.append(computed[num_before:] + (first + medium.start - share.start))
                rows.append(tower.rows(medium, share.hash_root)[:, num_before : len(computed)])
            if positions is not None and share.prompt.media:
                positions[:, first : first + share.num_tokens] = self._positions(share)
            first += share.num_tokens
        plain = inputs.positions if positions is None else np.ascontiguousarray(positions[0])
        found = replace(inputs, positions=plain)
        if not places:
            return found
        of_elements = None if positions is None else self._tensor(positions[self._dimensions].T)
        return replace(found, media=MediaRows(self._tensor(np.concatenate(places)), torch.cat(rows, 1), of_elements))

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def _positions(self, share: ScheduledRequest) -> Array:
        """Of the tokens of a share, [3, n]: one for each dimension. Behind a medium they go on where it ends."""
        found = np.repeat(np.arange(share.start, share.context_len)[None], 3, axis=0)
        shift = 0
        for medium in share.prompt.media:
            facts = self._towers[medium.kind].facts
            behind = max(0, medium.stop - share.start)
            begin, end = max(0, medium.start - share.start), min(behind, share.num_tokens)
            if begin < end:
                within = facts.coordinates(medium, np.arange(begin, end) + (share.start - medium.start))
                found[:, begin:end] = medium.start + shift + np.stack(within)
            step = facts.num_positions(medium) - medium.num_tokens
            found[:, behind:] += step
            shift += step
        return found


def _parts(share: ScheduledRequest) -> Iterator[tuple[Medium, int, int]]:
    """The media that a share has tokens of, and from which place to which."""
    for medium in share.prompt.media:
        begin, end = max(medium.start, share.start), min(medium.stop, share.context_len)
        if begin < end:
            yield medium, begin, end
