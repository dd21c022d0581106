"""What the processes of all groups need: the device, small engines, and how to say that this machine lacks something.

Owns how parts of Baton are put together for a check, so that no check knows a constructor twice.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu_check.run import UNAVAILABLE
from bench.gpu_check.settings import CPU, CUDA
from bench.gpu_check.shapes import config_of
from device.base import Device
from device.choose import open_device
from engine.build import Engine, build_engine
from engine.runner.kv_memory import allocate_private
from engine.settings import EngineSettings
from kvtransfer.transports.registry import NCCL, NIXL
from wire.errors import RequestFailed


class Unavailable(RequestFailed):
    """This machine lacks what a check needs."""

    def __init__(self, reason: str) -> None:
        super().__init__(UNAVAILABLE + reason)


@dataclass(frozen=True, slots=True)
class Setup:
    """What a group was told. `device` is "cuda" or "cpu"."""

    device: str
    is_quick: bool

    @property
    def is_gpu(self) -> bool:
        """Whether speeds mean something."""
        return self.device == CUDA

    @property
    def engine_device(self) -> str:
        """The `--device` of engines: where no GPU is, the host behind the code paths of one."""
        return CUDA if self.is_gpu else "emulated"

    def model(self, name: str) -> str:
        """The sizes to measure: those of `name`, tiny ones where no GPU is."""
        return name if self.is_gpu else "tiny"

    def label(self, name: str) -> str:
        """How a row names the model of `model(name)`."""
        return name if self.is_gpu else f"tiny for {name}"

    def open(self) -> Device:
        """The device. Raises `InvalidSetting`."""
        return open_device(CUDA if self.is_gpu else CPU)


def require_transport(name: str, setup: Setup) -> None:
    """Raise `Unavailable` when this machine cannot carry KV that way."""
    if name == NIXL and importlib.util.find_spec(NIXL) is None:
        raise Unavailable("nixl is not installed: pip install 'baton-serve[nixl]'")
    if name == NCCL and setup.is_gpu and torch.cuda.device_count() < 2:
        raise Unavailable("nccl needs a GPU for each node, and there is one")


class NoiseEngines:
    """Engines of published sizes with random weights, built from a `config.json` alone."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._folder = tempfile.TemporaryDirectory(prefix="baton-gpu-check-")

    def build(self, model: str, **settings: Any) -> Engine:
        """An engine of the sizes of `model` (see `bench.gpu_check.shapes`); `settings` are those of an engine."""
        folder = Path(self._folder.name) / model
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config_of(model)))
        return build(self._setup, folder, load_format="dummy", **settings)

    def close(self) -> None:
        """Remove the files."""
        self._folder.cleanup()


def build(setup: Setup, folder: Path, **settings: Any) -> Engine:
    """The engine of a checkpoint folder on the device that is checked."""
    num_threads = 0 if setup.is_gpu else 1
    chosen = EngineSettings(model=str(folder), device=setup.engine_device, num_threads=num_threads, **settings)
    return build_engine(chosen, allocate_private)


def first_line(error: BaseException) -> str:
    """What an error says, for a table."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:160]}"
