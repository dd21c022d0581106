"""A runner whose blocks have layers of a draft behind those of its model.

Who follows the layers of a step counts those of the draft, too: they are told behind the model's, whether anything of
them is computed or not.
"""

from __future__ import annotations

from baton.device.base import Device
from baton.engine.attention.base import LayerStored
from baton.engine.runner.base import Runner, RunningStep
from baton.engine.scheduler.step import Step


class DraftedRunner:
    """Computes what `runner` does, on `device`. See `Runner`. `num_layers`: those of the draft."""

    def __init__(self, runner: Runner, device: Device, num_layers: int) -> None:
        self.is_asynchronous = runner.is_asynchronous
        self._runner = runner
        self._device = device
        self._num_layers = num_layers

    def launch(self, step: Step, layer_stored: LayerStored | None = None) -> RunningStep:
        """Launch the step, and tell of the draft's layers behind the others."""
        launched = self._runner.launch(step, layer_stored)
        if layer_stored is not None:
            with self._device.issuing():
                for _ in range(self._num_layers):
                    self._device.notify(layer_stored)
        return launched
