"""A sparse MLP: each token goes through the few experts that its routing chooses, and through a shared one if there is.

Letters: T tokens of the step, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from baton.engine.models.adapters.low_rank import Adapters
from baton.engine.models.config import ModelConfig
from baton.engine.models.expert_settings import ExpertSettings
from baton.engine.models.parameters import Parameter
from baton.engine.models.parts.base import Part, PartSetup
from baton.engine.models.parts.clamped_experts import ClampedExperts
from baton.engine.models.parts.experts import Experts, SeparateExperts
from baton.engine.models.parts.linear import Linear, Matrix
from baton.engine.models.parts.mlp import GatedMlp
from baton.engine.models.parts.routing import ExpertRouting


class SparseMlp:
    """The sum of the chosen experts of each token. See `Part`."""

    def __init__(
        self, name: str, tensors: str, settings: ExpertSettings, config: ModelConfig, setup: PartSetup
    ) -> None:
        """`name` of its parameters, `tensors` of the checkpoint's."""
        names = config.names
        self._collectives, setup = setup.collectives, replace(setup, collectives=None)
        self._routing = ExpertRouting(name, f"{tensors}.{names.routing}", settings, config, setup)
        kind: type[ClampedExperts | SeparateExperts | Experts] = Experts
        if settings.is_clamped or setup.quantization.is_published:
            kind = ClampedExperts if settings.is_clamped else SeparateExperts
        # an expert has other rows than the step
        alone = replace(setup, adapters=Adapters())
        self._experts = kind(f"{name}.experts", f"{tensors}.experts", settings, config, alone)
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
        added = self._experts(x, *self._routing(x))
        if self._shared is not None:
            shared = self._shared(x)
            if self._shared_gate is not None:
                shared = self._shared_gate(x).sigmoid_() * shared
            added += shared
        # once for all of it: the shared expert's share is not added up by itself
        return added if self._collectives is None else self._collectives.add_up(added)

    def parameters(self) -> Iterator[Parameter]:
        """The parameters of routing, of the experts, and of the shared expert."""
        for part in self._parts():
            yield from part.parameters()

    def pack(self) -> None:
        """Pack routing, experts and the shared expert."""
        for part in self._parts():
            part.pack()

    def _parts(self) -> Iterator[Part]:
        yield self._routing
        yield self._experts
        for part in (self._shared, self._shared_gate):
            if part is not None:
                yield part
