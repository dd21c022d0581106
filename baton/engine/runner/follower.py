"""Who computes with what a step has left, before anybody hears that the step is done.

Owns the contract alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from baton.engine.attention.base import LayerStored
from baton.engine.runner.forward import Stream
from baton.engine.scheduler.step import Step


class ComputedStep(NamedTuple):
    """A step of which everything is issued. `stream`: of its tokens, valid until the next step is computed; `token_ids`
    [N]: those that its rows sampled, one after another, in the order of its requests."""

    step: Step
    stream: Stream
    token_ids: Sequence[int] | Tensor
    layer_stored: LayerStored | None


class StepFollower(Protocol):
    """Has layers of its own behind those of the model, in the same blocks."""

    def follow(self, computed: ComputedStep) -> None:
        """Compute what is wanted of the step, and tell `layer_stored`, if there is one, for each layer of its own.
        Called in the order of launches, within the launch."""
        ...
