"""The contract of all parts of a model, and what they are constructed with.

A part takes what it needs of the config and of a `PartSetup`, allocates its parameters, and says which tensors of a
checkpoint they are made of. A layer of another kind is made of other parts, and no other code has to know.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from baton.engine.models.collectives import Collectives
from baton.engine.models.ops.base import DecoderOps
from baton.engine.models.parameters import Parameter
from baton.engine.models.quantization.base import UNQUANTIZED, Quantization
from baton.engine.models.shard import Shard


@dataclass(frozen=True, slots=True)
class PartSetup:
    """The values that all parts of one model on one device share. `shard`: this rank's share of the divided weights;
    `quantization`: of the weights of products.

    `collectives`: by which parts put the shares of all ranks together; None: a part's result is this rank's share of
    it, and the vocabulary is not divided.
    """

    dtype: torch.dtype
    device: torch.device
    ops: DecoderOps
    shard: Shard
    collectives: Collectives | None = None
    quantization: Quantization = UNQUANTIZED

    def empty(self, *shape: int) -> Tensor:
        """Memory for a parameter that is still to be loaded."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class Part(Protocol):
    """A piece of a model that owns parameters."""

    def parameters(self) -> Iterator[Parameter]:
        """The parameters, which must be loaded before the part computes. Only before `pack`."""
        ...

    def pack(self) -> None:
        """Bring what was loaded into the formats that this device computes with fastest. Once; nothing can be loaded
        afterwards."""
        ...
