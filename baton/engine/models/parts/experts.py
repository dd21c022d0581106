"""The experts of a sparse MLP: gated MLPs, of which each token has its own.

Owns where their weights are published. What they compute, and in which order, is `expert_products.py`.

Letters: T tokens of the step, E hidden size, X experts, K experts of each token, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from baton.engine.models.config import ModelConfig
from baton.engine.models.expert_settings import ExpertSettings
from baton.engine.models.linear_weights import LoadedWeight, PlainWeight
from baton.engine.models.parameters import Box, Parameter, Source
from baton.engine.models.parts.base import PartSetup
from baton.engine.models.parts.expert_products import (
    ExpertMatrices,
    Products,
    expert_gate,
    make_products,
    quantized_products,
)
from baton.engine.models.parts.linear import Matrix, unread_weight
from baton.engine.models.quantization.base import Unread, joined


class Experts:
    """The experts of a plain checkpoint: gated MLPs, of which each token has its own. See `Part`."""

    def __init__(
        self, name: str, tensors: str, settings: ExpertSettings, config: ModelConfig, setup: PartSetup
    ) -> None:
        """Allocate this rank's rows of all experts. `name` is for messages, `tensors` the prefix of names in the
        checkpoint."""
        names, inner, size = config.names, settings.intermediate_size, config.hidden_size
        share = setup.shard.share_of(inner, "rows of an expert")
        count, rows = settings.num_experts, len(share)
        self._gate_up: Tensor | None = setup.empty(count, 2 * rows, size)
        self._down: Tensor | None = setup.empty(count, size, rows)
        gate_up: list[Source] = []
        down: list[Source] = []
        for expert in range(count):
            prefix = f"{tensors}.{expert}"
            for part, first in ((names.expert_gate, 0), (names.expert_up, rows)):
                place: Box = (range(expert, expert + 1), range(first, first + rows), range(size))
                gate_up.append(Source(f"{prefix}.{part}.weight", (inner, size), (share, range(size)), place))
            place = (range(expert, expert + 1), range(size), range(rows))
            down.append(Source(f"{prefix}.{names.expert_down}.weight", (size, inner), (range(size), share), place))
        held = (count * setup.quantization.held_bytes(*shape) for shape in ((2 * rows, size), (size, rows)))
        self._parameters = [
            Parameter(f"{name}.gate_up", self._gate_up, tuple(gate_up), held_bytes=next(held)),
            Parameter(f"{name}.down", self._down, tuple(down), held_bytes=next(held)),
        ]
        self._gate = expert_gate(config.hidden_act, setup)
        self._setup = setup
        self._products: Products | None = None

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts, [T, E] of x [T, E]. `chosen`: [T, K] experts, `weights`: [T, K]."""
        assert self._products is not None  # packed
        return self._products(x, chosen, weights)

    def parameters(self) -> Iterator[Parameter]:
        """The parameters of all experts; nothing after `pack`."""
        yield from self._parameters

    def pack(self) -> None:
        """Hand the matrices to the products, and drop the loaded ones."""
        assert self._gate_up is not None
        assert self._down is not None
        pairs = zip(self._gate_up, self._down, strict=True)
        experts = (ExpertMatrices(PlainWeight(gate_up), PlainWeight(down)) for gate_up, down in pairs)
        self._products = make_products(self._gate, experts, self._setup)
        # where the products have copies in another format, nothing refers to these any more
        self._gate_up = self._down = None
        self._parameters = []


class SeparateExperts:
    """The experts of a quantized checkpoint: each matrix is loaded as it is published, and stays so. See `Part`."""

    def __init__(
        self, name: str, tensors: str, settings: ExpertSettings, config: ModelConfig, setup: PartSetup
    ) -> None:
        """Make two products an expert. `name` is for messages, `tensors` the prefix of names in the checkpoint."""
        names, inner, size = config.names, settings.intermediate_size, config.hidden_size
        share = setup.shard.share_of(inner, "rows of an expert")
        self._unread: list[tuple[Sequence[Unread], Sequence[Unread]]] = []
        for expert in range(settings.num_experts):
            own, prefix = f"{name}.{expert}", f"{tensors}.{expert}"
            matrices = [Matrix(f"{prefix}.{part}", inner, share) for part in (names.expert_gate, names.expert_up)]
            gate_up = unread_weight(f"{own}.gate_up", matrices, size, range(size), setup)
            down_matrix = Matrix(f"{prefix}.{names.expert_down}", size, range(size))
            self._unread.append((gate_up, unread_weight(f"{own}.down", [down_matrix], inner, share, setup)))
        self._gate = expert_gate(config.hidden_act, setup)
        self._setup = setup
        self._products: Products | None = None

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts, [T, E] of x [T, E]. `chosen`: [T, K] experts, `weights`: [T, K]."""
        assert self._products is not None  # packed
        return self._products(x, chosen, weights)

    def parameters(self) -> Iterator[Parameter]:
        """The parameters of all experts, in order; nothing after `pack`."""
        for pair in self._unread:
            for unread in (*pair[0], *pair[1]):
                yield from unread.parameters()

    def pack(self) -> None:
        """Hand the weights to the products."""
        loaded = []
        while self._unread:
            gate_up, down = self._unread.pop(0)
            loaded.append((_loaded(gate_up), _loaded(down)))
        self._products = quantized_products(self._gate, loaded, self._setup)


def _loaded(unread: Sequence[Unread]) -> list[LoadedWeight]:
    return joined([each.loaded() for each in unread])
