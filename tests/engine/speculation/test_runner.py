"""Who follows the layers of a step hears of those of its draft, too."""

from __future__ import annotations

import pytest

from baton.device.emulated import EmulatedDevice
from baton.device.host import HostDevice
from baton.engine.attention.base import LayerStored
from baton.engine.runner.base import RunningStep
from baton.engine.scheduler.step import Step
from baton.engine.speculation.runner import DraftedRunner


class ThreeLayers:
    is_asynchronous = False

    def launch(self, step: Step, layer_stored: LayerStored | None = None) -> RunningStep:
        if layer_stored is not None:
            for _ in range(3):
                layer_stored()
        return None  # type: ignore[return-value]  # nobody asks for it


@pytest.mark.parametrize("device", [HostDevice(), EmulatedDevice()])
def test_layers_of_the_draft_are_told_behind_those_of_the_model(device: HostDevice | EmulatedDevice) -> None:
    told: list[None] = []
    runner = DraftedRunner(ThreeLayers(), device, 2, lambda step, layer_stored: None)
    runner.launch(Step(()), lambda: told.append(None))
    device.settle()
    assert len(told) == 5
    runner.launch(Step(()))
    device.settle()
    assert len(told) == 5
