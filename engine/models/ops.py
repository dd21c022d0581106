"""What a decoder layer computes between its matrix products, and the choice of who computes it.

Owns: the contract of these operations, the torch implementation (which defines the results, rounding included, as
transformers rounds), and the choice by device. Knows no layers and no parameters.

On a GPU each of these operations would be several kernels that take longer to start than to run: at one token a step,
that is where the time of a decoder goes. `engine/models/triton_ops.py` has each as one kernel.

Letters: T tokens of the step, E hidden size, I intermediate size, H heads, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.rope import Rotation, rotate

_log = logging.getLogger(__name__)


class DecoderOps(Protocol):
    """The operations of a decoder. All tensors are on one device, in the model's dtype; what is computed within an
    operation is float32, rounded to that dtype after each step that its description names.

    Rows (tokens) of an argument may be any distance apart, what lies within a row is contiguous. Results are new
    contiguous tensors. Nothing is read back by the host, so all of it can be recorded in a graph.
    """

    def add_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add `delta` [T, E] to `residual` [T, E] in place, rounded; return the RMS norm of the sum [T, E]:
        x / sqrt(mean(x^2) + eps), rounded, times `weight` [E], rounded. Without delta the residual stays as it is."""
        ...

    def norm_rotate(self, x: Tensor, weight: Tensor | None, eps: float, rotation: Rotation) -> Tensor:
        """The rotation of x [T, H, D], with `weight` [H, D] that of its RMS norm, taken head by head as in `add_norm`.

        Rotated is x * cos, rounded, plus each element's partner * signed sin, rounded; the sum is rounded.
        """
        ...

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate), rounded, times up, rounded: [T, I] of `gate_up` [T, 2 I], which holds gate first."""
        ...


class TorchOps:
    """See `DecoderOps`: on any device, and what other implementations are compared with."""

    def add_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """See `DecoderOps.add_norm`."""
        if delta is not None:
            residual.add_(delta)
        return _rms_norm(residual, weight, eps)

    def norm_rotate(self, x: Tensor, weight: Tensor | None, eps: float, rotation: Rotation) -> Tensor:
        """See `DecoderOps.norm_rotate`."""
        if weight is not None:
            x = _rms_norm(x, weight, eps)
        return rotate(x, *rotation)

    def gate(self, gate_up: Tensor) -> Tensor:
        """See `DecoderOps.gate`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # rms_norm does not get the weight: it would multiply before rounding to the dtype, transformers rounds first.
    return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)


def load_triton_ops(device: torch.device) -> DecoderOps:
    """Triton's operations, tried out. Raises whatever importing, compiling or starting a kernel raises."""
    from engine.models.triton_ops import TritonOps

    ops = TritonOps()
    # the first launch builds a module with the machine's own C compiler and Python's headers: both may be missing
    ops.gate(torch.zeros(1, 32, device=device))
    return ops


def choose_ops(device: torch.device, *, load: Callable[[torch.device], DecoderOps] = load_triton_ops) -> DecoderOps:
    """The fastest operations for `device`: Triton's on CUDA, where Triton works, torch's everywhere else.

    One log line says why a GPU has to do without.
    """
    if device.type != "cuda":
        return TorchOps()
    try:
        return load(device)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # a compiler fails in many ways, and none of them makes torch's operations wrong
        _log.warning("operations: plain torch instead of Triton: %s: %.200s", type(error).__name__, error)
        return TorchOps()
