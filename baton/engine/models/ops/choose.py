"""Chooses the operations of a decoder on a device.

In torch, each operation between two products is several GPU kernels, which take longer to start than to run: a decoder
spends most of its time there when a step has one token. `triton_ops.py` has each operation as one kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from baton.engine.models.ops.base import DecoderOps
from baton.engine.models.ops.cpu_ops import CpuOps
from baton.engine.models.ops.native_ops import NativeOps
from baton.engine.models.ops.torch_ops import TorchOps
from baton.engine.native.library import Kernels
from baton.wire.errors import InvalidSetting

_log = logging.getLogger(__name__)


def load_triton_ops(device: torch.device) -> DecoderOps:
    """Triton's operations, tried out. Raises whatever importing, compiling or starting a kernel raises."""
    from baton.engine.models.ops.triton_ops import TritonOps

    ops = TritonOps()
    # the first launch builds a module with the machine's own C compiler and Python's headers: both may be missing
    ops.gate(torch.zeros(1, 32, device=device))
    return ops


def choose_ops(
    device: torch.device,
    kernels: Kernels | None = None,
    *,
    rounds_activations: bool = False,
    load: Callable[[torch.device], DecoderOps] = load_triton_ops,
) -> DecoderOps:
    """The fastest operations for `device`: Triton's on CUDA, where Triton works; `kernels` on a CPU where there are
    some, else packed products; torch's everywhere else.

    One log line says why a GPU gets plain torch. Raises `InvalidSetting` where `rounds_activations` has no kernels.
    """
    if rounds_activations and kernels is None:
        raise InvalidSetting("--activation-dtype int8 needs Baton's CPU kernels (see --cpu-kernels)")
    if device.type == "cpu":
        return CpuOps() if kernels is None else NativeOps(kernels, rounds_activations=rounds_activations)
    if device.type != "cuda":
        return TorchOps()
    try:
        return load(device)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # a compiler fails in many ways, and none of them makes torch's operations wrong
        _log.warning("operations: plain torch instead of Triton: %s: %.200s", type(error).__name__, error)
        return TorchOps()
