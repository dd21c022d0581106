"""What every measurement is told, and how engines are put together for it."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu_check.models import BLOCK_SIZE, config_of
from bench.gpu_check.timing_process import Stopwatch
from bench.limits.steps_process import EngineSteps
from device.base import Device
from device.choose import open_device
from engine.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class Setup:
    """`device` is "cuda" or "cpu"."""

    device: str
    is_quick: bool

    @property
    def is_gpu(self) -> bool:
        """Whether speeds mean something."""
        return self.device == "cuda"

    def model(self, name: str) -> str:
        """The sizes to measure: those of `name`, tiny ones where no GPU is."""
        return name if self.is_gpu else "tiny"

    def label(self, name: str) -> str:
        """How a row names the model of `model(name)`."""
        return name if self.is_gpu else f"tiny for {name}"

    def open(self) -> Device:
        """The device. Raises `InvalidSetting`."""
        return open_device(self.device)

    def stopwatch(self) -> Stopwatch:
        """For the device. Raises `InvalidSetting`."""
        return Stopwatch(self.open().torch_device, quick=self.is_quick)

    def steps(self, name: str, num_tokens: int, num_requests: int, **settings: Any) -> EngineSteps:
        """An engine of the sizes of `name` with random weights and room for so many requests of so many tokens.

        Where no GPU is, it runs on the host's cores behind the code paths of one.
        """
        with tempfile.TemporaryDirectory(prefix="baton-gpu-check-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config_of(self.model(name))))
            chosen = EngineSettings(
                model=folder,
                device="cuda" if self.is_gpu else "emulated",
                num_threads=0 if self.is_gpu else 1,
                load_format="dummy",
                block_size=BLOCK_SIZE,
                max_model_len=num_tokens,
                num_blocks=2 + num_requests * -(-num_tokens // BLOCK_SIZE),
                max_num_seqs=num_requests,
                **settings,
            )
            return EngineSteps(chosen)
