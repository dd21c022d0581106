"""Rates of what runs on the device beside the products of the model: fused operations, checksums of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench.gpu_check.models import block_bytes, config_of, gb_per_s
from bench.gpu_check.rows import Row, rate_row
from bench.gpu_check.setup_process import Setup
from bench.gpu_check.timing_process import Stopwatch
from engine.models.config import ModelConfig, parse_config
from engine.models.ops.base import DecoderOps
from engine.models.ops.choose import choose_ops
from engine.models.ops.torch_ops import TorchOps
from engine.models.rope import RotaryEmbedding
from kvtransfer.integrity import DOT64
from kvtransfer.pools.device import DevicePool

_EPS = 1e-6
_TIMED_ROWS = (64, 8192)


@torch.inference_mode()
def operation_rows(setup: Setup) -> Iterator[Row]:
    """Bytes per second of the fused operations and of plain torch, in operands that no cache holds."""
    watch = setup.stopwatch()
    ceiling = watch.copy_gb_per_s()
    config = parse_config(config_of(setup.model("8B")))
    # the same twice where there are no fused ones
    for ops in {type(ops): ops for ops in (choose_ops(watch.device), TorchOps())}.values():
        for count in _TIMED_ROWS if setup.is_gpu else _TIMED_ROWS[:1]:
            for name, call, num_bytes in _calls(ops, config, count, watch):
                taken_ms = watch.recorded_ms(call)
                case, note = f"{count} rows, {setup.label('8B')}", f"{taken_ms * 1e3:.3g} us"
                yield rate_row(
                    f"{type(ops).__name__} {name}", case, gb_per_s(num_bytes, taken_ms), "GB/s", ceiling, note
                )


def _calls(
    ops: DecoderOps, config: ModelConfig, count: int, watch: Stopwatch
) -> Iterator[tuple[str, Callable[[], object], int]]:
    """(name, a call, the bytes it cannot avoid) for a step of `count` tokens."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=watch.device).to(torch.bfloat16)

    residuals, weight = watch.rotated(lambda: normal(2, count, config.hidden_size)), normal(config.hidden_size)

    def add_norm() -> object:
        residual, delta = residuals().unbind(0)
        return ops.add_norm(residual, delta, weight, _EPS)

    yield "add_norm", add_norm, 4 * residuals()[0].nbytes
    num_heads = config.num_heads + config.num_kv_heads
    # a view of wider rows, as a decoder has them
    fused = watch.rotated(lambda: normal(count, num_heads + config.num_kv_heads, config.head_dim))
    head_weight = normal(num_heads, config.head_dim)
    rotation = RotaryEmbedding(config, watch.device).tables(torch.arange(count, device=watch.device), torch.bfloat16)
    num_bytes = 2 * 2 * count * num_heads * config.head_dim
    yield "norm_rotate", lambda: ops.norm_rotate(fused()[:, :num_heads], head_weight, _EPS, rotation), num_bytes
    gates = watch.rotated(lambda: normal(count, 2 * config.intermediate_size))
    yield "gate", lambda: ops.gate(gates()), gates().nbytes * 3 // 2


def checksum_rows(setup: Setup) -> Iterator[Row]:
    """Bytes per second of checksums computed on the device."""
    watch = setup.stopwatch()
    size, count = block_bytes(setup.model("8B")), 512 if setup.is_gpu else 16
    pool = DevicePool(torch.randint(0, 256, (count, size), dtype=torch.uint8, device=watch.device))
    computer, ids = pool.checksums(DOT64), list(range(count))
    step = max(1, min(computer.max_blocks, count))

    def compute() -> None:
        for first in range(0, count, step):
            pending = computer.begin(ids[first : first + step])
            while pending.take() is None:
                continue

    taken_ms = watch.median_ms(compute)
    rate, case = gb_per_s(count * size, taken_ms), f"{count} blocks of {size / 2**20:.3g} MiB"
    yield rate_row("dot64 on the device", case, rate, "GB/s", watch.read_gb_per_s(), f"{taken_ms:.3g} ms")
