"""The images of a step: which of its tokens get rows of the tower for embeddings, and the positions behind them.

Owns the way from the images of requests to rows of a step, whatever part of an image a chunk begins or ends in. Images
are computed when the first chunk needs them. A step has at most as many of their rows as it has tokens, and so no more
images than that, which bounds what it takes.

Letters: T tokens of the step, M of them that get a row, E hidden size, K as in `SeenRows`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baton.device.base import Array
from baton.engine.models.seen import SeenRows
from baton.engine.models.vision.facts import ImageFacts
from baton.engine.runner.inputs import StepInputs
from baton.engine.scheduler.request import ScheduledRequest
from baton.engine.scheduler.step import Step
from baton.wire.images import PromptImage


class Sees(Protocol):
    """What computes images: a `Tower`, whose module takes seconds to be imported."""

    @property
    def facts(self) -> ImageFacts:
        """Those of its model."""
        ...

    def rows(self, image: PromptImage, hash_root: bytes) -> Tensor:
        """[1 + K, M, E] of an image with pixels; the caller does not change it. What is kept is found with the same
        `hash_root` only."""
        ...


class StepImages:
    """Finds what `tower` has for the tokens of a step; its rows are on `device`. See `InputReader`."""

    def __init__(self, tower: Sees, device: torch.device) -> None:
        self._tower = tower
        self._facts = tower.facts
        self._dimensions = np.array(tower.facts.sections * 2, dtype=np.int64)
        self._device = device

    def read(self, step: Step, inputs: StepInputs) -> StepInputs:
        """`inputs` with the rows and positions of images."""
        if not any(share.prompt.images for share in step.requests):
            return inputs
        places, rows = [], []
        positions = np.repeat(inputs.positions[None], 3, axis=0) if self._facts.sections else None
        first = 0
        for share in step.requests:
            for image, begin, end in _parts(share):
                ids = np.array(share.token_ids[image.start : end], dtype=np.int64)
                seen = np.flatnonzero(ids == self._facts.token_id)
                num_before = int(np.searchsorted(seen, begin - image.start))
                places.append(seen[num_before:] + (first + image.start - share.start))
                rows.append(self._tower.rows(image, share.hash_root)[:, num_before : len(seen)])
            if positions is not None and share.prompt.images:
                positions[:, first : first + share.num_tokens] = self._positions(share)
            first += share.num_tokens
        plain = inputs.positions if positions is None else np.ascontiguousarray(positions[0])
        found = replace(inputs, positions=plain)
        if not places:
            return found
        of_elements = None if positions is None else self._tensor(positions[self._dimensions].T)
        return replace(found, seen=SeenRows(self._tensor(np.concatenate(places)), torch.cat(rows, 1), of_elements))

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def _positions(self, share: ScheduledRequest) -> Array:
        """Of the tokens of a share, [3, n]: by time, row and column. Behind an image they go on where it ends."""
        found = np.repeat(np.arange(share.start, share.context_len)[None], 3, axis=0)
        shift = 0
        for image in share.prompt.images:
            behind = max(0, image.stop - share.start)
            begin, end = max(0, image.start - share.start), min(behind, share.num_tokens)
            if begin < end:
                place = np.arange(begin, end) + (share.start - image.start)
                columns = image.width // self._facts.edge
                in_image = np.stack((np.zeros_like(place), place // columns, place % columns))
                found[:, begin:end] = image.start + shift + in_image
            step = self._facts.num_positions(image) - image.num_tokens
            found[:, behind:] += step
            shift += step
        return found


def _parts(share: ScheduledRequest) -> Iterator[tuple[PromptImage, int, int]]:
    """The images that a share has tokens of, and from which place to which."""
    for image in share.prompt.images:
        begin, end = max(image.start, share.start), min(image.stop, share.context_len)
        if begin < end:
            yield image, begin, end
