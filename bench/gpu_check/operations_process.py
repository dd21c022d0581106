"""Checks of a decoder's fused operations: against float64, against plain torch, and their rate of bytes.

Owns the inputs and the counted bytes. Letters: T tokens, E hidden size, I intermediate size, H heads, D head size.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu_check.floors import gb_per_s
from bench.gpu_check.parts_process import Setup
from bench.gpu_check.rows import Row, error_row, missing_row, rate_row, worst_of
from bench.gpu_check.shapes import config_of
from bench.gpu_check.timing_process import Stopwatch, copy_gb_per_s, rotated
from engine.models.config import parse_config
from engine.models.decoder import TORCH_DTYPES
from engine.models.ops.base import DecoderOps
from engine.models.ops.torch_ops import TorchOps
from engine.models.rope import RotaryEmbedding, Rotation

NAMES = ("add_norm", "norm", "norm_rotate", "rotate", "gate")
ERROR_BOUNDS = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 2e-6}
"""Of an element, over the largest exact one: a few roundings."""
SAME_BOUNDS = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 2e-6}
"""Between two implementations that round at the same places: one unit in the last place of the largest."""
ROWS = (1, 3, 64, 257)
_EPS = 1e-6
_TIMED_ROWS = (64, 8192)


@dataclass(frozen=True, slots=True)
class Operands:
    """Inputs of all operations: residual and delta [T, E], x [T, H, D] as a view of wider rows, gate_up [T, 2 I]."""

    residual: Tensor
    delta: Tensor
    weight: Tensor
    heads: Tensor
    head_weight: Tensor
    gate_up: Tensor
    rotation: Rotation

    def exact(self) -> Operands:
        """The same values in float64."""
        cos, sin = self.rotation
        return Operands(
            self.residual.double(),
            self.delta.double(),
            self.weight.double(),
            self.heads.double(),
            self.head_weight.double(),
            self.gate_up.double(),
            (cos.double(), sin.double()),
        )


def make_operands(num_rows: int, dtype: str, device: torch.device, model: str, seed: int = 0) -> Operands:
    """Random operands of the sizes of a model."""
    config, kind = parse_config(config_of(model)), TORCH_DTYPES[dtype]
    chance = torch.Generator(device).manual_seed(seed)
    num_heads, size = config.num_heads + config.num_kv_heads, config.head_dim

    def normal(*shape: int, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=chance, device=device) + mean).to(kind)

    positions = torch.randint(0, 8192, (num_rows,), generator=chance, device=device)
    fused = normal(num_rows, num_heads + config.num_kv_heads, size)
    return Operands(
        residual=normal(num_rows, config.hidden_size),
        delta=normal(num_rows, config.hidden_size),
        weight=normal(config.hidden_size, mean=1.0),
        heads=fused[:, :num_heads],
        head_weight=normal(num_heads, size, mean=1.0),
        gate_up=normal(num_rows, 2 * config.intermediate_size),
        rotation=RotaryEmbedding(config, device).tables(positions, kind),
    )


def run_operation(ops: DecoderOps, name: str, given: Operands) -> tuple[Tensor, ...]:
    """What an operation returns, and the residual that it may have changed."""
    residual = given.residual.clone()
    match name:
        case "add_norm":
            return ops.add_norm(residual, given.delta, given.weight, _EPS), residual
        case "norm":
            return ops.add_norm(residual, None, given.weight, _EPS), residual
        case "norm_rotate":
            return (ops.norm_rotate(given.heads, given.head_weight, _EPS, given.rotation),)
        case "rotate":
            return (ops.norm_rotate(given.heads, None, _EPS, given.rotation),)
        case "gate":
            return (ops.gate(given.gate_up),)
        case _:
            raise ValueError(f"unknown operation {name}")


@torch.inference_mode()
def operation_errors(ops: DecoderOps, name: str, given: Operands) -> tuple[float, float]:
    """(error against float64, difference from plain torch), each over the largest exact value."""
    found = run_operation(ops, name, given)
    exact = run_operation(TorchOps(), name, given.exact())
    plain = run_operation(TorchOps(), name, given)
    return _worst(found, exact, exact), _worst(found, plain, exact)


def available_ops(device: torch.device) -> dict[str, DecoderOps | str]:
    """The implementations to check, or why one cannot be."""
    found: dict[str, DecoderOps | str] = {"torch": TorchOps()}
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return {"triton": "triton is not installed", **found}
        from engine.models.ops.triton_ops import TritonOps

        return {"triton": TritonOps(), **found}
    return found


class OperationsBench:
    """See `Bench`."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._device = setup.open()
        self._place = self._device.torch_device
        self._model = setup.model("8B")

    def check(self, name: str) -> list[Row]:
        """See `Bench.check`."""
        rows = []
        for kind, ops in available_ops(self._place).items():
            if isinstance(ops, str):
                rows.append(missing_row(f"operations, {kind}", name, ops))
            elif name == "error":
                rows += self._errors(kind, ops)
            else:
                rows += self._rates(kind, ops)
        return rows

    def close(self) -> None:
        """See `Bench.close`."""
        self._device.close()

    def _errors(self, kind: str, ops: DecoderOps) -> list[Row]:
        rows = []
        for dtype in ("bfloat16", "float16", "float32"):
            for name in NAMES:
                given = [make_operands(count, dtype, self._place, self._model, count) for count in ROWS]
                errors, differences = zip(*(operation_errors(ops, name, each) for each in given), strict=True)
                note = f"{', '.join(map(str, ROWS))} rows"
                row = error_row(f"{kind} {name}", dtype, worst_of(errors), ERROR_BOUNDS[dtype], "of max", note=note)
                rows.append(row)
                if kind != "torch":
                    bound = SAME_BOUNDS[dtype]
                    rows.append(
                        error_row(f"{kind} {name} against torch", dtype, worst_of(differences), bound, "of max")
                    )
        return rows

    @torch.inference_mode()
    def _rates(self, kind: str, ops: DecoderOps) -> list[Row]:
        watch = Stopwatch(self._place, quick=self._setup.is_quick)
        ceiling = copy_gb_per_s(self._place, watch)
        rows = []
        for count in _TIMED_ROWS if self._setup.is_gpu else _TIMED_ROWS[:1]:
            for name in ("add_norm", "norm_rotate", "gate"):
                call, num_bytes = self._timed(ops, name, count)
                taken_ms = watch.recorded_ms(call)
                case = f"{count} rows, {self._setup.label('8B')}"
                note = f"{taken_ms * 1e3:.3g} us"
                rate = gb_per_s(num_bytes, taken_ms)
                rows.append(rate_row(f"{kind} {name}", case, rate, "GB/s", ceiling, note=note))
        return rows

    def _timed(self, ops: DecoderOps, name: str, count: int) -> tuple[Callable[[], object], int]:
        """A call over operands that rotate through more than the caches, and the bytes it cannot avoid."""
        given = make_operands(count, "bfloat16", self._place, self._model)
        if name == "gate":
            gates = rotated(self._place, lambda: given.gate_up.clone())
            return lambda: ops.gate(gates()), given.gate_up.nbytes * 3 // 2
        if name == "norm_rotate":
            heads, tables = rotated(self._place, lambda: given.heads.clone()), given.rotation
            num_bytes = 2 * given.heads.numel() * given.heads.element_size()
            return lambda: ops.norm_rotate(heads(), given.head_weight, _EPS, tables), num_bytes
        residuals = rotated(self._place, lambda: torch.stack((given.residual, given.delta)))

        def add_norm() -> object:
            residual, delta = residuals().unbind(0)
            return ops.add_norm(residual, delta, given.weight, _EPS)

        return add_norm, 4 * given.residual.nbytes


def open_bench(setup: Setup) -> OperationsBench:
    """See `bench.gpu_check.worker_process`."""
    return OperationsBench(setup)


def _worst(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    return worst_of(
        float((mine.double() - theirs.double()).abs().max() / scale.abs().max())
        for mine, theirs, scale in zip(found, wanted, exact, strict=True)
    )
