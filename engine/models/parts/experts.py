"""A sparse MLP: each token goes through the few experts that its router chooses, and through a shared one if there is.

Owns the experts' weights and the order of their sums, which depends on the experts alone: what a token gets is the same
whatever else is in the step. Products are grouped: tokens are sorted by expert, and each expert multiplies its own.

Letters: T tokens of the step, E hidden size, X experts, K experts of each token, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.expert_settings import ExpertSettings
from engine.models.linear_weights import PlainWeight
from engine.models.parameters import Box, Parameter, Source
from engine.models.parts.base import PartSetup
from engine.models.parts.linear import Linear, Matrix
from engine.models.parts.mlp import GatedMlp, gate_of
from engine.models.parts.routing import Router


class SparseMlp:
    """The sum of the chosen experts of each token. See `Part`."""

    def __init__(
        self, name: str, tensors: str, settings: ExpertSettings, config: ModelConfig, setup: PartSetup
    ) -> None:
        """`name` of its parameters, `tensors` of the checkpoint's."""
        names = config.names
        self._router = Router(name, f"{tensors}.{names.router}", settings, config, setup)
        self._experts = Experts(f"{name}.experts", f"{tensors}.experts", settings, config, setup)
        self._shared: GatedMlp | None = None
        self._shared_gate: Linear | None = None
        if settings.shared_size:
            shared = f"{tensors}.{names.shared}"
            self._shared = GatedMlp(f"{name}.shared", shared, settings.shared_size, config, setup)
        if settings.has_shared_gate:
            gate = Matrix(f"{tensors}.shared_expert_gate", 1, range(1))
            self._shared_gate = Linear.column_parallel(f"{name}.shared_gate", [gate], config.hidden_size, False, setup)

    def __call__(self, x: Tensor) -> Tensor:
        """The MLP's summand for the residual stream, [T, E] of x [T, E]."""
        added = self._experts(x, *self._router(x))
        if self._shared is not None:
            shared = self._shared(x)
            if self._shared_gate is not None:
                shared = self._shared_gate(x).sigmoid_() * shared
            added += shared
        return added

    def parameters(self) -> Iterator[Parameter]:
        """See `Part.parameters`."""
        for part in self._parts():
            yield from part.parameters()

    def pack(self) -> None:
        """See `Part.pack`."""
        for part in self._parts():
            part.pack()

    def _parts(self) -> Iterator[Router | Experts | GatedMlp | Linear]:
        yield self._router
        yield self._experts
        for part in (self._shared, self._shared_gate):
            if part is not None:
                yield part


class Experts:
    """Gated MLPs, of which each token has its own. See `Part`."""

    def __init__(
        self, name: str, tensors: str, settings: ExpertSettings, config: ModelConfig, setup: PartSetup
    ) -> None:
        """See `SparseMlp`."""
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
        self._parameters = [
            Parameter(f"{name}.gate_up", self._gate_up, tuple(gate_up)),
            Parameter(f"{name}.down", self._down, tuple(down)),
        ]
        self._gate = gate_of(config.hidden_act, setup)
        self._num_experts = count
        self._setup = setup
        self._products: list[tuple[Linear, Linear]] = []

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[T, E] of x [T, E], the experts `chosen` [T, K] and their `weights` [T, K]."""
        num_chosen = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        tokens = order // num_chosen
        rows, factors = x[tokens], weights.flatten()[order, None].to(x.dtype)
        counts = torch.bincount(chosen.flatten(), minlength=self._num_experts).tolist()
        added = torch.zeros_like(x)
        first = 0
        for (gate_up, down), count in zip(self._products, counts, strict=True):
            if count == 0:
                continue
            own = slice(first, first + count)
            computed = down(self._gate(gate_up(rows[own])))
            # each token once: an expert's results go to different rows, in the order of the experts
            added.index_add_(0, tokens[own], computed * factors[own])
            first += count
        return added

    def parameters(self) -> Iterator[Parameter]:
        """See `Part.parameters`."""
        yield from self._parameters

    def pack(self) -> None:
        """See `Part.pack`."""
        assert self._gate_up is not None
        assert self._down is not None
        ops = self._setup.ops
        for gate_up, down in zip(self._gate_up, self._down, strict=True):
            pair = (Linear(PlainWeight(gate_up), None, ops), Linear(PlainWeight(down), None, ops))
            for linear in pair:
                linear.pack()
            self._products.append(pair)
        # where the products have copies in another format, nothing refers to these any more
        self._gate_up = self._down = None
        self._parameters = []
