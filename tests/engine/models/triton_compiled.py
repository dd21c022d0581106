"""What the Triton kernels are compiled to, and when, for a GPU that need not be here. Run by test_triton_ops.py in a
process of its own: what is compiled for the driver below must not stay in a process that may have a real one.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from baton.engine.models.ops import triton_ops
from baton.engine.models.ops.triton_ops import TritonOps
from tests.engine.models.op_cases import DTYPES, EPS, random, random_rotation

SHAPES = {  # hidden size, intermediate size, rotated heads, head size
    "8B": (4096, 14336, 40, 128),
    "small": (896, 4864, 16, 64),
    "odd": (80, 200, 5, 80),
}


class AbsentGpu:
    """A driver of Triton: compiles, and accepts every launch."""

    utils = SimpleNamespace(
        load_binary=lambda *_: (1, 1, 32, 0, 1024),
        unload_module=lambda _: None,
        get_device_properties=lambda _: {"max_shared_mem": 2**17},
    )

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability  # as a device of its own: compiled kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *_: None


@pytest.fixture(params=[90])
def capability(request: pytest.FixtureRequest) -> int:
    triton.runtime.driver.set_active(AbsentGpu(request.param))
    for kernel in (triton_ops._add_norm, triton_ops._norm_rotate, triton_ops._gate):
        kernel.device_caches.clear()
    return int(request.param)


def compiled(capability: int) -> list[Any]:
    kernels = (triton_ops._add_norm, triton_ops._norm_rotate, triton_ops._gate)
    return [variant for kernel in kernels for variant in kernel.device_caches[capability][0].values()]


def run(shape: str, num_tokens: int, dtype: torch.dtype) -> None:
    size, inner, num_heads, head_dim = SHAPES[shape]
    ops, weight = TritonOps(), random(1, size, dtype=dtype)[0]
    residual, delta = random(num_tokens, size, dtype=dtype), random(num_tokens, size, dtype=dtype)
    ops.add_norm(residual, None, weight, EPS)
    ops.add_norm(residual, delta, weight, EPS)
    qk = random(num_tokens, num_heads, head_dim, dtype=dtype, gap=8 * head_dim)
    for qk_weight in (None, random(num_heads, head_dim, dtype=dtype)):
        ops.norm_rotate(qk, qk_weight, EPS, random_rotation(num_tokens, head_dim, dtype))
    ops.gate(random(num_tokens, 2 * inner, dtype=dtype))


@pytest.mark.parametrize(
    ("capability", "shape", "dtype"),
    [
        (80, "8B", torch.bfloat16),
        (90, "odd", torch.bfloat16),
        (90, "small", torch.bfloat16),
        *((90, "8B", dtype) for dtype in DTYPES),
    ],
    indirect=["capability"],
)
def test_one_step_compiles_for_all_lengths(shape: str, dtype: torch.dtype, capability: int) -> None:
    run(shape, 3, dtype)
    assert len(compiled(capability)) == 5
    for num_tokens in (1, 2, 16, 33, 64):
        run(shape, num_tokens, dtype)
    assert len(compiled(capability)) == 5


# Before 90 there are no products and sums of bfloat16 but as part of one instruction.
@pytest.mark.parametrize(
    ("capability", "dtype"), [*((90, dtype) for dtype in DTYPES), (100, torch.bfloat16)], indirect=["capability"]
)
def test_no_rounding_is_fused_away(dtype: torch.dtype, capability: int) -> None:
    run("8B", 1, dtype)
    for kernel in compiled(capability):
        assert re.findall(r"(?:mul|add)\.\S*f\S+", kernel.asm["ptx"]), kernel.name
        assert re.findall(r"fma\.\S+", kernel.asm["ptx"]) == [], kernel.name


def test_offsets_of_tokens_are_wide(capability: int) -> None:
    run("8B", 1, torch.bfloat16)
    for kernel in compiled(capability):
        widths = re.findall(r"arith\.muli %token\w*, .* : (\w+)", kernel.asm["ttir"])
        assert set(widths) == {"i64"}, kernel.name


@pytest.mark.parametrize(("shape", "dtype"), [("small", torch.bfloat16), *(("8B", dtype) for dtype in DTYPES)])
def test_memory_is_moved_in_16_byte_pieces(shape: str, dtype: torch.dtype, capability: int) -> None:
    run(shape, 1, dtype)
    for kernel in compiled(capability):
        accesses = re.findall(r"(?:ld|st)\.global\S*", kernel.asm["ptx"])
        assert accesses, kernel.name
        assert {access for access in accesses if ".v4.b32" not in access} == set(), kernel.name
