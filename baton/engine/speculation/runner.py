"""A runner whose blocks have layers of a draft behind those of its model.

Who follows the layers of a step counts those of the draft, too: they are told behind the model's, whether anything of
them is computed or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from baton.device.base import Device
from baton.engine.attention.base import LayerStored
from baton.engine.runner.base import Runner, RunningStep
from baton.engine.scheduler.reading import RowsRead
from baton.engine.scheduler.step import SampledTokens, Step
from baton.wire.request_key import RequestKey

LaunchBeside: TypeAlias = Callable[[Step, LayerStored | None], RunningStep | None]
"""Begins to compute what a draft stores of a step that was just launched; None where that is nothing."""


@dataclass(frozen=True, slots=True)
class _WithDraft:
    """A step, and what its draft computes beside it."""

    step: RunningStep
    draft: RunningStep

    def result(self) -> Mapping[RequestKey, SampledTokens]:
        """Wait for both; the tokens of the step."""
        sampled = self.step.result()
        self.draft.result()
        return sampled

    def rows_read(self) -> Mapping[RequestKey, RowsRead]:
        """What the step has read."""
        return self.step.rows_read()


class DraftedRunner:
    """Computes what `runner` does, on `device`. See `Runner`. `num_layers`: those of the draft; `launch_beside`: what
    of them is computed with a step."""

    def __init__(self, runner: Runner, device: Device, num_layers: int, launch_beside: LaunchBeside) -> None:
        self.is_asynchronous = runner.is_asynchronous
        self._runner = runner
        self._device = device
        self._num_layers = num_layers
        self._launch_beside = launch_beside

    def launch(self, step: Step, layer_stored: LayerStored | None = None) -> RunningStep:
        """Launch the step, and tell of the draft's layers behind the others."""
        launched = self._runner.launch(step, layer_stored)
        draft = self._launch_beside(step, layer_stored)
        if draft is not None:
            return _WithDraft(launched, draft)
        if layer_stored is not None:
            with self._device.issuing():
                for _ in range(self._num_layers):
                    self._device.notify(layer_stored)
        return launched
