"""A parameter, and the checkpoint tensors it is made of. Imports no torch.

Owns the description that loading follows (`baton.engine.models.loading`) and that the parts of a model give
(`baton.engine.models.parts`). Fused weights, shares of a rank and repeated norms are all the same case: a piece of a
checkpoint's tensor is written into a region of a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Box: TypeAlias = tuple[range, ...]
"""Part of a tensor: the indices of each dimension, one step apart."""


@dataclass(frozen=True, slots=True)
class Source:
    """The piece of a checkpoint's tensor that goes into a parameter.

    `shape` is what the file must have under `name`, `taken` the piece of it that is read. It is written into `region`
    of the parameter; with fewer dimensions than the region it is repeated along the first ones.
    `is_transposed`: what is taken is written with its dimensions the other way round.
    """

    name: str
    shape: tuple[int, ...]
    taken: Box
    region: Box
    is_transposed: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether all of the tensor is read."""
        return self.taken == whole(self.shape)

    @property
    def fits(self) -> bool:
        """Whether what is taken is there, and fills the region when it is repeated along the first dimensions."""
        is_there = all(
            taken.start >= 0 and taken.stop <= size for taken, size in zip(self.taken, self.shape, strict=True)
        )
        sizes = [*map(len, self.taken)][:: -1 if self.is_transposed else 1]
        return is_there and sizes == [*map(len, self.region)][-len(self.shape) :]

    @property
    def is_empty(self) -> bool:
        """Whether the tensor belongs to another rank and nothing of it is read."""
        return not all(self.region)


@dataclass(frozen=True, slots=True, eq=False)
class Parameter:
    """A tensor that loading fills from `sources`.

    `name`: unique within a model, for messages. `center`: the mean of its elements in trained models, for random
    weights. `copies`: names under which a checkpoint may have the same content once more. `held_bytes`: what it takes
    after loading, where that is not what the tensor takes; `gpu_bytes`: on a GPU, where it is something else again.
    """

    name: str
    tensor: Tensor
    sources: tuple[Source, ...]
    center: float = 0.0
    copies: tuple[str, ...] = ()
    held_bytes: int = 0
    gpu_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """The bytes of memory that the parameter takes after loading."""
        return self.held_bytes or self.tensor.nbytes

    @property
    def num_gpu_bytes(self) -> int:
        """The bytes of a GPU's memory that it takes after loading."""
        return self.gpu_bytes or self.num_bytes

    def take_memory_back(self) -> None:
        """Leave a tensor of host memory without it until `allocate`. Nearly all are packed then and freed, so that what
        is written next lies in the same pages: new ones take longer than the copy."""
        storage = self.tensor.untyped_storage()
        if self.tensor.device.type == "cpu" and storage.nbytes() == self.tensor.nbytes:
            storage.resize_(0)

    def allocate(self) -> None:
        """Give the tensor its memory, if it has none: it is about to be written."""
        if self.tensor.untyped_storage().nbytes() == 0:
            self.tensor.untyped_storage().resize_(self.tensor.nbytes)

    @property
    def is_covered(self) -> bool:
        """Whether the sources write each element exactly once."""
        fit = all(source.fits for source in self.sources)
        return fit and _is_covered(tuple(self.tensor.shape), [source.region for source in self.sources])


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return tuple(range(size) for size in shape)


def slices(box: Box) -> tuple[slice, ...]:
    """A box as an index of a tensor."""
    return tuple(slice(indices.start, indices.stop) for indices in box)


def _is_covered(shape: tuple[int, ...], regions: Sequence[Box]) -> bool:
    """The borders of all regions make a grid; counting its cells is enough, because a region has a cell entirely or not
    at all."""
    borders = []
    for dimension, size in enumerate(shape):
        edges = {edge for region in regions for edge in (region[dimension].start, region[dimension].stop)}
        borders.append({edge: place for place, edge in enumerate(sorted({0, size, *edges}))})
        if min(borders[-1]) < 0 or max(borders[-1]) > size:
            return False
    counts = np.zeros([len(places) - 1 for places in borders], dtype=np.int64)
    for region in regions:
        cells = zip(borders, region, strict=True)
        counts[tuple(slice(places[indices.start], places[indices.stop]) for places, indices in cells)] += 1
    return bool((counts == 1).all())
